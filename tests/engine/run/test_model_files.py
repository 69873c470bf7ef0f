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
from fastgpu.predict.inputs import DescribedSource
from fastgpu.process.launch import UserError
from fastgpu.run import checkpoint, model_files
from fastgpu.run.model_files import ModelToUse, describe_model, refuse_other_meaning, write_model
from fastgpu.storage.arrays import ArrayDataset

CARD = {"classes": ["a", "b"]}


def describe(card=CARD, **attributes):
    source = ArrayDataset("made up", {"x": np.zeros((3, 4), np.uint8), "y": np.zeros(3, np.int64)}, attributes)
    return describe_model(CONFIG.flat(), (source, source), card, ("score", "higher"))


def save(run, description):
    (run / "checkpoints").mkdir()
    return checkpoint.save(
        run, "last", checkpoint.Progress(step=7), {}, order={}, to_use=ModelToUse(nn.Linear(2, 2), description)
    )


def test_what_is_written_is_what_was_known(tmp_path):
    assert save(tmp_path, describe(mean=np.array([1.5], np.float32), class_names=["a", "b"], count=np.int64(3)))
    description = json.loads((tmp_path / "checkpoints/last-000001/model.json").read_text())
    assert description["attributes"] == {"mean": [1.5], "class_names": ["a", "b"], "count": 3} | CARD
    assert description["template_version"] == TEMPLATE_VERSION
    assert (description["workload"], description["options"]) == ("minimal", {"hidden_dim": 8})
    assert description["fields"]["x"]["dataset"] == "images"  # as data.fields names it
    fields = DescribedSource(description).fields
    assert {name: (field.dtype, field.shape) for name, field in fields.items()} == {
        "x": (np.dtype("u1"), (4,)),
        "y": (np.dtype("i8"), ()),
    }


def test_a_card_or_an_attribute_that_is_no_json_names_the_workload():
    with pytest.raises(UserError, match=r"workloads/minimal.py: card\(\), and .*, should be JSON values .* Linear"):
        describe({"network": nn.Linear(2, 2)})
    with pytest.raises(UserError, match=r"the attributes of made up, should be JSON values .* object"):
        describe(strange=object())
    assert describe({"mean": torch.ones(2)})["attributes"] == {"mean": [1.0, 1.0]}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.output = nn.Linear(3, 5, bias=False)
        self.output.weight = self.embed.weight


def test_tied_weights_and_other_memory_formats_come_back_and_may_be_read_like_the_description(tmp_path):
    model = nn.Sequential(Tied(), nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last))
    write_model(tmp_path, ModelToUse(model, {}))
    other = nn.Sequential(Tied(), nn.Conv2d(3, 4, 3))
    load_model(other, tmp_path / "model.safetensors")
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name])
    assert len({stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}) == 1


def test_a_full_disk_costs_the_checkpoint_only(tmp_path, monkeypatch, capsys):
    def refuse(*_, **__):
        raise SafetensorError("Error while serializing: No space left on device")

    monkeypatch.setattr(model_files, "save_model", refuse)
    assert not save(tmp_path, {})
    assert "was not written: Error while serializing: No space left" in capsys.readouterr().out
    assert not list(tmp_path.glob("checkpoints/*"))


def test_classes_with_other_numbers_are_refused(tmp_path):
    save(tmp_path, describe(class_names=["cat", "dog"]))
    path = checkpoint.find_intact(tmp_path)
    refuse_other_meaning(path, describe(class_names=["cat", "dog"]))
    with pytest.raises(UserError, match="number 0 of the labels is dog in data.train and cat in .*last-000001"):
        refuse_other_meaning(path, describe(class_names=["dog", "cat"]))
