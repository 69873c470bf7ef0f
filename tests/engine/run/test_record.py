import json
import stat

import numpy as np
import torch
from safetensors.torch import load_model
from torch import nn

from fastgpu.feed import Splits
from fastgpu.predict.model import training_rows
from fastgpu.rows.order import BlockSampler
from fastgpu.run import checkpoint
from fastgpu.run.record import describe_model, identify_job
from fastgpu.storage.arrays import ArrayDataset
from support.runs import SHORT_CONFIG, SHORT_SOURCE


class Tied(nn.Module):
    """A model with tied weights and another memory format."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.output = nn.Linear(3, 5, bias=False)
        self.output.weight = self.embed.weight
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)


def test_record_model_comes_back_with_its_description(tmp_path):
    attributes = {"mean": np.array([1.5], np.float32), "class_names": ["a", "b"], "count": np.int64(3)}
    source = ArrayDataset("made up", {"x": np.zeros((3, 4), np.uint8), "y": np.zeros(3, np.int64)}, attributes)
    card = describe_model(SHORT_CONFIG.flat(), Splits(source, {"val": source}), {"classes": ["a", "b"]}, {})
    model = Tied()
    (tmp_path / "checkpoints").mkdir()
    checkpoint.save(
        tmp_path, "last", checkpoint.Progress(step=7), checkpoint.take_snapshot({"model": model}), card=card
    )
    path = tmp_path / "checkpoints/last-000001"
    description = json.loads((path / "model.json").read_text())
    assert description["attributes"] == {"mean": [1.5], "class_names": ["a", "b"], "count": 3, "classes": ["a", "b"]}
    assert (description["workload"], description["options"]) == ("minimal", {"hidden_dim": 8})
    assert description["fields"]["x"]["dataset"] == "images"  # as data.fields names it
    fields = {name: (field.dtype.str, field.shape) for name, field in training_rows(description).fields.items()}
    assert fields == {"x": ("|u1", (4,)), "y": ("<i8", ())}
    other = Tied()
    load_model(other, path / "model.safetensors")
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())
    assert len({stat.S_IMODE(each.stat().st_mode) for each in path.iterdir()}) == 1


def job_of(**sections: dict[str, object]) -> dict[str, object]:
    """What identifies a job with these settings."""
    return identify_job(
        SHORT_CONFIG.resolved(**sections).flat(),
        Splits(SHORT_SOURCE, {"val": SHORT_SOURCE}),
        BlockSampler(SHORT_SOURCE, 4).fingerprint,
    )


def test_record_job_is_what_decides_the_weights():
    job = job_of()
    for section, key, value in (
        ("run", "seed", 1),
        ("optim", "lr", 0.1),
        ("model", "hidden_dim", 3),
        ("data", "val_fields", {"x": "other"}),
        ("dist", "strategy", "dp"),
    ):
        other = job_of(**{section: {key: value}})
        assert [name for name in other if job.get(name) != other[name]] == [f"{section}.{key}"]
    data = {"train": "/node/a.h5", "val": "/node/b.h5", "tier": "host"}
    assert job_of(data=data, loader={"num_readers": 3}) == job
