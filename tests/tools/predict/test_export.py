import json
import resource

import pytest
import torch
from test_model import FIELDS, trained_with
from torch import Tensor, nn

from fastgpu.predict import model as module
from fastgpu.predict.model import export
from fastgpu.process.launch import UserError


class Mean(nn.Module):
    """A model of images and items, whose number of values is free."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(50.0))

    def forward(self, image: Tensor, items: Tensor) -> Tensor:
        return image.float().mean((1, 2, 3)) + self.weight[items.long()].sum()


class Workload:
    inputs = ("image", "items")

    def predict(self, model, batch):
        return {"y": model(batch["image"], batch["items"].values)}


def trained(workload=None, model=None):
    return trained_with(workload or Workload(), FIELDS)._replace(model=(model or Mean()).eval())


def check(program, shift):
    for n_rows in (1, 4):
        image = torch.full((n_rows, 3, 4, 4), 7, dtype=torch.uint8)
        items = torch.arange(3 * n_rows, dtype=torch.int32)
        torch.testing.assert_close(program(image, items), Mean()(image, items) + shift)


def test_the_program_gives_the_numbers_of_the_model_for_any_number_of_rows(tmp_path):
    line = export(trained(), tmp_path / "a.pt2")
    assert "takes any number of rows" in line
    texts = {"model.json": ""}
    check(torch.export.load(tmp_path / "a.pt2", extra_files=texts).module(), 0)
    assert json.loads(texts["model.json"])["inputs"] == ["image", "items"]


@pytest.mark.slow
def test_onnx(tmp_path):
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    export(trained(), tmp_path / "a.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx")
    names = [each.name for each in session.get_inputs()]
    assert json.loads(session.get_modelmeta().custom_metadata_map["model.json"])["inputs"] == ["image", "items"]

    def program(*inputs: Tensor) -> Tensor:
        arrays = [each.numpy() for each in inputs]
        return torch.from_numpy(session.run(None, dict(zip(names, arrays, strict=True)))[0])

    check(program, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["a.onnx"]


def test_without_the_extra_the_command_that_installs_it_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"a.onnx needs ONNX: pip install .*\[export\]"):
        export(trained(), tmp_path / "a.onnx")


def test_a_program_that_gives_other_numbers_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_difference", lambda *_: 0.01)
    with pytest.raises(UserError, match="it would differ from the model by 0.01 of its largest output"):
        export(trained(), tmp_path / "a.pt2")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_one_line(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(UserError, match=r"a.pt2 was not written: .*File too large"):
            export(trained(), tmp_path / "a.pt2")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


class DependsOnValues(Mean):
    def forward(self, image: Tensor, items: Tensor) -> Tensor:
        return super().forward(image, items) if int(items.sum()) % 2 else image.float()


def test_a_model_that_cannot_be_traced_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"a.pt2 was not written: .+") as caught:
        export(trained(model=DependsOnValues()), tmp_path / "a.pt2")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_the_model_is_called_with_arguments_by_position(tmp_path):
    class ByName(Workload):
        def predict(self, model, batch):
            return {"y": model(image=batch["image"], items=batch["items"].values)}

    with pytest.raises(UserError, match=r"predict should call model\(...\) with arguments by position"):
        export(trained(ByName()), tmp_path / "a.pt2")
