import json
import stat

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_model
from short_run import CONFIG
from torch import nn

from fastgpu import TEMPLATE_VERSION
from fastgpu.process.launch import UserError
from fastgpu.run import checkpoint, model_files
from fastgpu.run.model_files import (
    DescribedSource,
    ModelToUse,
    compare_with,
    describe_model,
    write_model,
)
from fastgpu.storage.arrays import ArrayDataset

CARD = {"classes": ["a", "b"]}


def make_source(**attributes):
    return ArrayDataset("made up", {"x": np.zeros((3, 4), np.uint8), "y": np.zeros(3, np.int64)}, attributes)


def describe(source, card=CARD):
    return describe_model(CONFIG.flat(), (source, source), card, ("score", "higher"))


def save(folder, model, description):
    """A checkpoint with the model. Returns its folder."""
    progress = checkpoint.Progress(step=7)
    (folder / "checkpoints").mkdir(exist_ok=True)
    to_use = ModelToUse(model, description)
    assert checkpoint.save(folder, "last", progress, {"model": model}, order={}, to_use=to_use)
    return folder / "checkpoints/last-000001"


def test_what_is_written_is_what_was_known(tmp_path):
    source = make_source(mean=np.array([1.5], np.float32), class_names=["a", "b"], count=np.int64(3))
    folder = save(tmp_path, nn.Linear(2, 2), describe(source))
    description = json.loads((folder / "model.json").read_text())
    assert description["attributes"] == {"mean": [1.5], "class_names": ["a", "b"], "count": 3} | CARD
    assert description["template_version"] == TEMPLATE_VERSION
    assert (description["workload"], description["options"]) == ("minimal", {"hidden_dim": 8})
    assert description["fields"]["x"]["dataset"] == "images"  # as data.fields names it
    described = DescribedSource(description)
    assert {name: field.signature for name, field in described.fields.items()} == {
        name: field.signature for name, field in source.fields.items()
    }
    assert len(described) == 0
    with pytest.raises(KeyError):
        described.column("y")


def test_a_card_that_is_no_json_names_the_workload():
    with pytest.raises(UserError, match=r"workloads/minimal.py: card\(\) should return JSON values .* it has a Linear"):
        describe(make_source(), {"network": nn.Linear(2, 2)})
    assert describe(make_source(), {"mean": torch.ones(2)})["attributes"] == {"mean": [1.0, 1.0]}


def test_an_attribute_that_is_no_json_is_told(capsys):
    assert describe(make_source(strange=object(), good=1), {})["attributes"] == {"good": 1}
    assert "made up: the attribute strange is no JSON value, so model.json does not keep it" in capsys.readouterr().out


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.output = nn.Linear(3, 5, bias=False)
        self.output.weight = self.embed.weight


def test_tied_weights_and_other_memory_formats_come_back(tmp_path):
    model = nn.Sequential(Tied(), nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last))
    write_model(tmp_path, ModelToUse(model, {}))
    other = nn.Sequential(Tied(), nn.Conv2d(3, 4, 3))
    load_model(other, tmp_path / "model.safetensors")
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name])


def test_whoever_may_read_the_description_may_read_the_weights(tmp_path):
    write_model(tmp_path, ModelToUse(nn.Linear(2, 2), {}))
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("model.json", "model.safetensors")}
    assert len(modes) == 1


def test_a_full_disk_costs_the_checkpoint_only(tmp_path, monkeypatch, capsys):
    def refuse(*_, **__):
        raise SafetensorError("Error while serializing: No space left on device")

    monkeypatch.setattr(model_files, "save_model", refuse)
    to_use = ModelToUse(nn.Linear(2, 2), {})
    (tmp_path / "checkpoints").mkdir()
    assert not checkpoint.save(tmp_path, "last", checkpoint.Progress(), {}, order={}, to_use=to_use)
    assert "was not written: Error while serializing: No space left" in capsys.readouterr().out
    assert not list(tmp_path.glob("checkpoints/last-*"))


def test_other_rows_are_refused_inside_an_epoch_only(tmp_path):
    folder = save(tmp_path, nn.Linear(2, 2), describe(make_source()))
    compare_with(folder, describe(make_source()), is_inside_epoch=True)
    more = ArrayDataset("more", {"x": np.zeros((4, 4), np.uint8), "y": np.zeros(4, np.int64)})
    with pytest.raises(UserError, match=r"inside an epoch, and the rows of data.train are not those"):
        compare_with(folder, describe(more), is_inside_epoch=True)
    compare_with(folder, describe(more), is_inside_epoch=False)


def test_classes_with_other_numbers_are_refused(tmp_path):
    folder = save(tmp_path, nn.Linear(2, 2), describe(make_source(class_names=["cat", "dog"])))
    with pytest.raises(UserError, match="number 0 of the labels is dog in data.train and cat in .*last-000001"):
        compare_with(folder, describe(make_source(class_names=["dog", "cat"])), is_inside_epoch=False)
