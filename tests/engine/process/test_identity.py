from fastgpu.process.config import Config
from fastgpu.run.record import identify_job


def config(**sections: dict[str, object]) -> dict[str, object]:
    data = {"train": "a.h5", "val": "b.h5", "fields": {"x": "images"}} | sections.pop("data", {})
    return Config.model_validate({"workload": "minimal", "data": data, **sections}).flat()


def test_what_decides_the_weights_must_be_the_same():
    job = identify_job(config())
    for other in (
        config(run={"seed": 1}),
        config(optim={"lr": 0.1}),
        config(train={"epochs": 3}),
        config(model={"hidden_dim": 3}),
        config(data={"batch_size": 32}),
        config(data={"val_fields": {"x": "other"}}),
        config(dist={"strategy": "dp"}),
    ):
        differing = [key for key, value in identify_job(other).items() if job.get(key) != value]
        assert len(differing) == 1, differing


def test_where_rows_lie_and_how_they_are_read_may_differ():
    job = identify_job(config())
    data = {"train": "/node/a.h5", "val": "/node/b.h5", "tier": "disk"}
    assert identify_job(config(data=data, loader={"num_readers": 3})) == job
