import numpy as np

from fastgpu.process.config import Config
from fastgpu.rows.order import BlockSampler
from fastgpu.run.record import identify_job
from fastgpu.storage.arrays import ArrayDataset


def config(**sections: dict[str, object]) -> dict[str, object]:
    data = {"train": "a.h5", "val": "b.h5", "fields": {"x": "images"}} | sections.pop("data", {})
    return Config.model_validate({"workload": "minimal", "data": data, **sections}).flat()


def job_of(settings: dict[str, object]) -> dict[str, object]:
    rows = ArrayDataset("x.h5", {"x": np.arange(8)})
    return identify_job(settings, (rows, rows), BlockSampler(rows, 4), str(settings["train.precision"]))


def test_what_decides_the_weights_must_be_the_same():
    job = job_of(config())
    for other in (
        config(run={"seed": 1}),
        config(optim={"lr": 0.1}),
        config(train={"epochs": 3}),
        config(model={"hidden_dim": 3}),
        config(data={"batch_size": 32}),
        config(data={"val_fields": {"x": "other"}}),
        config(dist={"strategy": "dp"}),
    ):
        differing = [key for key, value in job_of(other).items() if job.get(key) != value]
        assert len(differing) == 1, differing


def test_where_rows_lie_and_how_they_are_read_may_differ():
    job = job_of(config())
    data = {"train": "/node/a.h5", "val": "/node/b.h5", "tier": "disk"}
    assert job_of(config(data=data, loader={"num_readers": 3})) == job
