import json

import numpy as np
import pytest
import torch
import train
from harness import ALONE
from short_run import CONFIG
from torch import nn

from fastgpu.predict.model import Trained, find_checkpoint, load_model, make_rows
from fastgpu.process.config_loader import load_config
from fastgpu.process.launch import UserError
from fastgpu.rows.rows import Field
from fastgpu.run import checkpoint
from fastgpu.run.model_files import ModelToUse, describe_model
from fastgpu.storage.arrays import ArrayDataset
from workloads import minimal

FIELDS = {
    "image": Field(np.dtype(np.uint8), (3, 4, 4)),
    "x": Field(np.dtype(np.float32), (6,)),
    "index": Field(np.dtype(np.int64), ()),
    "items": Field(np.dtype(np.int32), (), 2.0, 50),
}


def trained_with(workload, fields) -> Trained:
    described = {
        name: {"dtype": str(field.dtype), "shape": field.shape, "is_ragged": field.is_ragged, "n_items": field.n_items}
        for name, field in fields.items()
    }
    return Trained(nn.Identity(), workload, {"workload": "mine", "fields": described, "attributes": {}})


# ---------------------------------------------------------------------------------------------- checkpoints


def test_of_a_run_the_best_checkpoint_is_taken_else_the_last(tmp_path):
    for name in ("last-000009", "last-1000000"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "checkpoints/last-1000000 (copy)").mkdir()
    assert find_checkpoint(tmp_path).name == "last-1000000"
    best = tmp_path / "checkpoints/best-000003"
    best.mkdir()
    assert find_checkpoint(tmp_path) == best
    (best / "model.json").touch()
    assert find_checkpoint(best) == best
    with pytest.raises(UserError, match="is neither a run nor a checkpoint"):
        find_checkpoint(tmp_path / "none")


def test_a_model_comes_back_as_it_was(folder):
    parts = train.build(load_config(["train.epochs=1", "model.hidden_dim=7"]), ALONE)
    parts.loader.close()
    parts.val_loader.close()
    train.train(train.build(load_config(["train.epochs=1", "model.hidden_dim=7", "train.ema=0.5"]), ALONE), ALONE)
    (best,) = (folder / "runs/a/checkpoints").glob("best-*")
    model, workload, card = load_model(best)
    assert not model.training
    assert isinstance(workload, minimal.Workload)
    assert workload.card() == parts.workload.card()
    averaged = torch.load(best / "ema.pt", weights_only=True)
    assert any(torch.equal(model.state_dict()["0.weight"], value) for value in averaged.values())  # the model to use
    assert card["options"] == {"hidden_dim": 7}
    # ---- the code of the workload has changed since
    description = json.loads((best / "model.json").read_text())
    (best / "state.json").unlink()
    (best / "model.json").write_text(json.dumps(description | {"options": {"hidden_dim": 8}}))
    with pytest.raises(UserError, match=r"does not fit workloads/minimal.py: .*size mismatch"):
        load_model(best)
    (best / "model.json").write_text(json.dumps(description | {"options": {"depth": 8}}))
    with pytest.raises(UserError, match=r"does not fit workloads/minimal.py: model.depth: Extra inputs"):
        load_model(best)


@pytest.mark.parametrize("content", ['{"format": ', "{}", "[]", "\0"])
@pytest.mark.parametrize("name", ["model.json", "state.json"])
def test_damaged_descriptions_are_one_line(tmp_path, name, content):
    for each in ("model.json", "model.safetensors"):
        (tmp_path / each).touch()
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=rf"{name} is damaged \(.*\); use another checkpoint"):
        load_model(tmp_path)


def save(folder):
    """A checkpoint of a small model. Returns its folder."""
    source = ArrayDataset("made up", {"x": np.zeros((3, 4), np.uint8), "y": np.zeros(3, np.int64)})
    to_use = ModelToUse(nn.Linear(2, 2), describe_model(CONFIG.flat(), (source, source), {}, ("score", "higher")))
    progress = checkpoint.Progress(step=7)
    (folder / "checkpoints").mkdir(exist_ok=True)
    assert checkpoint.save(folder, "last", progress, {"model": to_use.model}, order={}, to_use=to_use)
    return folder / "checkpoints/last-000001"


@pytest.mark.parametrize("name", ["model.json", "model.safetensors"])
def test_a_damaged_file_is_refused(tmp_path, name):
    folder = save(tmp_path)
    content = bytearray((folder / name).read_bytes())
    content[-2] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name} does not match its checksum"):
        load_model(folder)


@pytest.mark.parametrize("path", [("workload",), ("attributes",), ("fields", "x", "n_items"), ("fields", "x", "dtype")])
def test_a_copy_that_lacks_something_is_refused(tmp_path, path):
    folder = save(tmp_path)
    (folder / "state.json").unlink()
    description = json.loads((folder / "model.json").read_text())
    *parents, last = path
    part = description
    for name in parents:
        part = part[name]
    del part[last]
    (folder / "model.json").write_text(json.dumps(description))
    with pytest.raises(UserError, match=rf"model.json is damaged \({'.'.join(path)}: Field required\); use another"):
        load_model(folder)


def test_another_format_is_refused(tmp_path):
    folder = save(tmp_path)
    (folder / "state.json").unlink()
    description = json.loads((folder / "model.json").read_text())
    (folder / "model.json").write_text(json.dumps(description | {"format": 2}))
    with pytest.raises(UserError, match="model.json has format 2; this version reads 1"):
        load_model(folder)


def test_an_input_that_the_rows_do_not_have_is_told(folder, monkeypatch):
    train.train(train.build(load_config(["train.epochs=1"]), ALONE), ALONE)
    (best,) = (folder / "runs/a/checkpoints").glob("best-*")
    monkeypatch.setattr(minimal.Workload, "inputs", ("x", "z"))
    with pytest.raises(UserError, match=r"minimal.py: it declares the input z, which is no field of the rows; .* x, y"):
        load_model(best)


def test_made_up_rows_have_the_types_of_the_fields():
    rows = make_rows(FIELDS, 4)
    assert len(rows) == 4
    assert rows["image"].shape == (4, 3, 4, 4)
    assert (rows["image"].dtype, rows["x"].dtype) == (torch.uint8, torch.float32)
    assert rows["image"].any()
    assert rows["x"].any()
    assert not rows["index"].any()
    assert [len(rows["items"][n : n + 1].values) for n in range(4)] == [3] * 4
    assert rows["items"].values.max() < 50
