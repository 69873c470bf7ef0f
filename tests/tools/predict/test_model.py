"""Checkpoints and exported programs."""

import json
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fastgpu.predict.model import Trained, export, find_checkpoint, load_model, make_rows
from fastgpu.process.launch import UserError
from workloads import minimal

# ---------------------------------------------------------------------------------------------- checkpoints


def copy_of(run: Path, target: Path, names=("model.json", "model.safetensors", "state.json")) -> Path:
    """The folder of a copied checkpoint."""
    target.mkdir()
    for name in names:
        shutil.copy(find_checkpoint(run) / name, target)
    return target


def change(path: Path, *keys: str, **values) -> None:
    """Set values in a part of a JSON file."""
    content = part = json.loads(path.read_text())
    for key in keys:
        part = part[key]
    part.update(values)
    path.write_text(json.dumps(content))


def test_of_a_run_the_best_checkpoint_is_taken_else_the_last(tmp_path):
    for name in ("last-000009", "last-1000000", "last-1000000 (copy)"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert find_checkpoint(tmp_path).name == "last-1000000"
    best = tmp_path / "checkpoints/best-000003"
    best.mkdir()
    assert find_checkpoint(tmp_path) == best
    (best / "model.json").touch()
    assert find_checkpoint(best) == best
    with pytest.raises(UserError, match="is neither a run nor a checkpoint"):
        find_checkpoint(tmp_path / "none")


def test_a_model_comes_back_as_it_was(minimal_run):
    best = find_checkpoint(minimal_run)
    model, workload, card = load_model(best)
    assert not model.training
    assert isinstance(workload, minimal.Workload)
    averaged = torch.load(best / "ema.pt", weights_only=True)
    for name, value in model.state_dict().items():
        assert torch.equal(value, averaged[f"module.{name}"])
    assert (card["options"], card["attributes"]) == ({"hidden_dim": 64}, workload.card())


@pytest.mark.parametrize("name", ["model.json", "state.json"])
@pytest.mark.parametrize("content", ['{"format": ', "{}", "[]", "\0"])
def test_a_damaged_description_is_one_line(tmp_path, minimal_run, name, content):
    folder = copy_of(minimal_run, tmp_path / "copy", ("model.json", "model.safetensors"))
    (folder / name).write_text(content)
    with pytest.raises(UserError, match="copy is damaged, or of other code than workloads/ has: .") as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["model.json", "model.safetensors"])
def test_a_flipped_bit_or_a_missing_file_is_noticed(tmp_path, minimal_run, name):
    folder = copy_of(minimal_run, tmp_path / "copy")
    content = bytearray((folder / name).read_bytes())
    content[-2] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name} does not match its checksum"):
        load_model(folder)
    (folder / name).unlink()
    with pytest.raises(UserError, match=rf"copy is damaged.*No such file .*{name}"):
        load_model(folder)


@pytest.mark.parametrize(
    ("keys", "values", "message"),
    [
        ([], {"format": 2}, "format Input should be 1"),
        ([], {"workload": None}, "workload Input should be a valid string"),
        (["fields", "x"], {"dtype": "float31"}, "data type 'float31' not understood"),
        (["fields"], {"x": 6}, "copy is damaged"),
        (["options"], {"hidden_dim": 8}, "size mismatch"),
        (["options"], {"depth": 8}, "depth Extra inputs are not permitted"),
    ],
)
def test_a_copy_that_does_not_fit_is_refused(tmp_path, minimal_run, keys, values, message):
    folder = copy_of(minimal_run, tmp_path / "copy", ("model.json", "model.safetensors"))
    load_model(folder)
    change(folder / "model.json", *keys, **values)
    with pytest.raises(UserError, match=message):
        load_model(folder)


# ---------------------------------------------------------------------------------------------- export


class Mean(nn.Module):
    """A model of images and items, whose number of values is free."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(50.0))

    def forward(self, image: Tensor, items: Tensor) -> Tensor:
        return image.float().mean((1, 2, 3)) + self.weight[items.long()].sum()


class DependsOnValues(Mean):
    def forward(self, image: Tensor, items: Tensor) -> Tensor:
        return super().forward(image, items) if int(items.sum()) % 2 else image.float()


class IsOtherWhenTraced(Mean):
    def forward(self, image: Tensor, items: Tensor) -> Tensor:
        return super().forward(image, items) + int(torch.compiler.is_compiling())


class Workload:
    inputs = ("image", "items")

    def predict(self, model, batch):
        return {"y": model(batch["image"], batch["items"].values)}


def described(dtype: str, *shape: int, n_items: int | None = None):
    return {"dtype": dtype, "shape": shape, "is_ragged": n_items is not None, "n_items": n_items}


def trained(model: nn.Module | None = None) -> Trained:
    fields = {
        "image": described("uint8", 3, 4, 4),
        "items": described("int32", n_items=50),
        "index": described("int64"),
        "x": described("float32", 6),
    }
    card = {"fields": fields, "attributes": {"class_names": ["a", "b"], "preprocessing": "{}"}}
    return Trained((model or Mean()).eval(), Workload(), card)


def check(program) -> None:
    for n_rows in (1, 4):
        image = torch.full((n_rows, 3, 4, 4), 7, dtype=torch.uint8)
        items = torch.arange(3 * n_rows, dtype=torch.int32)
        torch.testing.assert_close(program(image, items), Mean()(image, items))


def test_the_program_gives_the_numbers_of_the_model_for_any_number_of_rows(tmp_path):
    export(trained(), tmp_path / "a.pt2")
    texts = {"model.json": ""}
    check(torch.export.load(tmp_path / "a.pt2", extra_files=texts).module())
    card = json.loads(texts["model.json"])
    assert card["inputs"] == ["image", "items"]
    assert card["attributes"] == trained().card["attributes"]


@pytest.mark.slow
def test_onnx(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    export(trained(), tmp_path / "a.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx")
    names = [each.name for each in session.get_inputs()]
    assert names == ["image", "items"]
    card = json.loads(session.get_modelmeta().custom_metadata_map["model.json"])
    assert card["attributes"] == trained().card["attributes"]

    def program(*inputs: Tensor) -> Tensor:
        arrays = [each.numpy() for each in inputs]
        return torch.from_numpy(session.run(None, dict(zip(names, arrays, strict=True)))[0])

    check(program)
    assert [path.name for path in tmp_path.iterdir()] == ["a.onnx"]


def test_what_cannot_be_exported_is_one_line_and_no_file(tmp_path):
    with pytest.raises(UserError, match=r"a.pt2 was not written: .+") as caught:
        export(trained(DependsOnValues()), tmp_path / "a.pt2")
    assert "\n" not in str(caught.value)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(UserError, match=r"a.pt2 was not written: .*File too large"):
            export(trained(), tmp_path / "a.pt2")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.raises(UserError, match="a.pt2 was not written: Tensor-likes are not close"):
        export(trained(IsOtherWhenTraced()), tmp_path / "a.pt2")
    assert not list(tmp_path.iterdir())


def test_made_up_rows_have_the_types_of_the_fields(monkeypatch):
    monkeypatch.setattr(Workload, "inputs", ("image", "items", "index", "x"))
    rows = make_rows(trained(), 4)
    assert rows["image"].shape == (4, 3, 4, 4)
    assert (rows["image"].dtype, rows["x"].dtype) == (torch.uint8, torch.float32)
    assert all(rows[name].any() for name in ("image", "x"))
    np.testing.assert_array_equal(rows["items"].host_offsets, [0, 2, 4, 6, 8])
    assert rows["items"].values.max() == 1
