"""Checkpoints, rows to predict, and exported programs."""

import json
import re
import resource
import shutil
import sys

import h5py
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from fastgpu.images.column import ImageCodec
from fastgpu.images.crops import Preprocessing
from fastgpu.predict.inputs import open_batches, open_inputs, places_of
from fastgpu.predict.model import export, load_model
from fastgpu.process.launch import UserError
from fastgpu.rows.rows import Ragged
from fastgpu.storage.store import open_store
from support import PROJECT
from support.images import write_encoded
from support.ranks import ALONE, printed_by, run_to_end
from support.rows import is_ragged, numbers_of, read_rows
from workloads import minimal

RNG = np.random.default_rng(0)


def test_model_comes_back_as_it_was(minimal_run):
    model, workload, card, rows, folder = load_model(minimal_run)
    assert not model.training
    assert isinstance(workload, minimal.Workload)
    assert str(rows.fields["x"]) == "float32 (N, 6)"
    (last,) = folder.parent.glob("last-*4")  # of the same step
    averaged = torch.load(last / "ema.pt", weights_only=True)
    for name, value in model.state_dict().items():
        assert torch.equal(value, averaged[f"module.{name}"])
    assert (card["options"], card["attributes"]) == ({"hidden_dim": 64}, workload.card())
    assert workload.options.hidden_dim == 64


def test_rows_to_predict_have_places(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, sources in (("a.h5", ["é.png", "b.png"]), ("b.h5", None), ("c.h5", [7])):
        with h5py.File(name, "w") as file:
            file["x"] = np.zeros(len(sources or [0] * 3))
            if sources:
                file["fastgpu_source"] = sources

    def named(*files: str) -> dict[str, list]:
        return {name: column.tolist() for name, column in places_of(open_store("INPUT", files, {"x": "x"})).items()}

    assert named("b.h5") == {"row": [0, 1, 2]}
    assert named("c.h5") == {"row": [0]}  # it is of another kind
    assert named("a.h5") == {"row": [0, 1], "source": ["é.png", "b.png"]}
    assert named("b.h5", "a.h5") == {
        "file": ["b.h5"] * 3 + ["a.h5"] * 2,
        "row": [0, 1, 2, 0, 1],
        "source": ["", "", "", "é.png", "b.png"],
    }
    rows = open_store("INPUT", ["b.h5", "a.h5"], {"x": "x"})
    files = [("https://h/x.h5?signature=1", "/"), ("https://h/y.h5?signature=2", "/val")]
    monkeypatch.setattr(type(rows), "files", files)
    monkeypatch.setattr(type(rows), "origins", lambda *_: [])
    assert {*places_of(rows)["file"]} == {"https://h/x.h5?...", "https://h/y.h5?...::/val"}


def test_model_of_a_run_is_the_best(copy_model, tmp_path):
    for name in ("last-000009", "last-1000000", "last-1000000 (copy)", "best-000003"):
        copy_model(f"checkpoints/{name}")
    best = tmp_path / "checkpoints/best-000003"
    assert load_model(tmp_path).folder == best
    best.rename(tmp_path / "best")
    assert load_model(tmp_path).folder.name == "last-1000000"
    assert load_model(tmp_path / "best").folder == tmp_path / "best"


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("model.json", b'{"format": ', "Invalid JSON"),
        ("model.json", {"format": 2}, "format Input should be 1"),
        ("model.json", {"options": {"hidden_dim": 8}}, "size mismatch"),
        ("model.json", {"options": {"depth": 8}}, "depth Extra inputs are not permitted"),
        ("state.json", b"{}", "sha256"),
        ("model.safetensors", b"", "."),
    ],
)
def test_model_that_does_not_fit_is_one_line(copy_model, name, content, reason):
    """content: of the file, or what model.json has in place of what was written."""
    path = copy_model("copy") / name
    if isinstance(content, dict):
        content = json.dumps(json.loads(path.read_text()) | content).encode()
    path.write_bytes(content)
    told = f"copy is no run or checkpoint, is damaged, or was saved by other code: .*{reason}"
    with pytest.raises(UserError, match=told) as caught:
        load_model(path.parent)
    assert "\n" not in str(caught.value)


def test_model_code_is_that_of_its_project(copy_model, tmp_path):
    (tmp_path / "other/workloads").mkdir(parents=True)
    (tmp_path / "other/workloads/__init__.py").touch()
    (tmp_path / "empty").mkdir()
    path = copy_model("copy")
    assert load_model(path, project=PROJECT).folder == path
    for project, message in (
        ("other", f"this process has imported the workloads of {PROJECT}; use another process for the modules of "),
        ("empty", f"{tmp_path}/empty has no workloads/__init__.py; load_model(..., project=FOLDER) names a project"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            load_model(path, project=tmp_path / project)
    card = json.loads((path / "model.json").read_text())
    (path / "model.json").write_text(json.dumps(card | {"workload": "mynet"}))
    with pytest.raises(UserError, match=r"^workload is mynet, but workloads/mynet.py does not exist; there are: "):
        load_model(path)


CODE = """
import sys
from fastgpu.predict.model import load_model
assert "workloads" not in sys.modules
print(load_model(sys.argv[1], project=sys.argv[2] or None).workload.__class__.__module__)
print(sys.modules["workloads"].__file__)
"""


@pytest.mark.slow
def test_model_code_is_found_beside_the_script(copy_model, tmp_path):
    """Of an engine that is installed elsewhere."""
    path, engine, project = copy_model("copy"), tmp_path / "engine", tmp_path / "project"
    engine.mkdir()
    project.mkdir()
    (engine / "fastgpu").symlink_to(PROJECT / "fastgpu")
    shutil.copytree(PROJECT / "workloads", project / "workloads")
    (project / "tool.py").write_text(CODE)
    expected = f"workloads.minimal\n{project}/workloads/__init__.py\n"
    for words in (["project/tool.py", path, ""], ["-c", CODE, path, "project"]):
        assert printed_by([sys.executable, *words], tmp_path, PYTHONPATH=str(engine)) == expected
    lost = run_to_end([sys.executable, "-c", CODE, path, ""], tmp_path, PYTHONPATH=str(engine))
    assert f"UserError: {tmp_path} has no workloads/__init__.py" in lost.stderr


@pytest.mark.parametrize("name", ["model.json", "model.safetensors"])
def test_model_with_a_flipped_bit_is_refused(copy_model, name):
    path = copy_model("copy", "state.json") / name
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=f"{name} does not match its checksum"):
        load_model(path.parent)


def read(source, name="images"):
    with open_batches(source, 4, ALONE.device) as batches:
        return np.concatenate([batch[name].numpy().copy() for batch in batches])


def test_rows_to_predict_keep_their_order(dense_file, ragged_file, model_of):
    trained = model_of({"x": {"shape": [1, 4, 2], "dataset": "images"}})
    paths = [dense_file(20, name="a.h5"), dense_file(15, name="b.h5", start=20)]
    assert numbers_of(read(open_inputs(paths, trained), "x")) == list(range(35))
    items = {"dtype": "int32", "is_ragged": True, "n_items": 1000}
    with open_batches(open_inputs([ragged_file(50)], model_of({"items": items})), 50, ALONE.device) as batches:
        assert is_ragged(next(batches)["items"], range(50))


def test_rows_to_predict_of_another_type(tmp_path, model_of):
    np.save(tmp_path / "y.npy", np.arange(5, dtype=np.uint16))
    assert read(open_inputs([f"{tmp_path}/y.npy"], model_of({"y": {"dtype": "int64"}})), "y").tolist() == [*range(5)]


def images_of(*shape):
    return {"images": {"shape": shape}}


def save_image(path, height=6, width=6, mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = RNG.integers(0, 256, (height, width, 3) if mode == "RGB" else (height, width)).astype(np.uint8)
    Image.fromarray(pixels).save(path)
    return np.moveaxis(pixels, -1, 0) if mode == "RGB" else pixels


def test_images_to_predict_as_validated(tmp_path, model_of):
    paths = [tmp_path / f"{number}.png" for number in range(5)]
    for number, path in enumerate(paths):
        save_image(path, 20 + number, 30)
    write_encoded(tmp_path / "encoded.h5", [path.read_bytes() for path in paths])
    validated = open_store(
        "x", str(tmp_path / "encoded.h5"), {"images": "images"}, {"images": ImageCodec((8, 8), 0.25)}
    )
    trained = model_of(images_of(3, 8, 8), **validated.attributes)
    for inputs in ([*map(str, paths)], [f"{tmp_path}/encoded.h5"]):
        np.testing.assert_array_equal(read(open_inputs(inputs, trained)), read_rows(validated)["images"])


def test_images_to_predict_in_order(tmp_path, monkeypatch, model_of):
    monkeypatch.chdir(tmp_path)
    names = ["z.png", "deep/a/1.png", "deep/b/2.png", "deep/c/broken.png", "deep/c/large.png"]
    pixels = {name: save_image(tmp_path / name) for name in names[2::-1]}
    save_image(tmp_path / "deep/c/large.png", 7, 5)
    (tmp_path / "deep/c/broken.png").write_text("no image")
    source = open_inputs(["z.png", "deep"], model_of(images_of(3, 6, 6)))
    assert [*map(str, source.files)] == names
    np.testing.assert_array_equal(read(source)[:3], np.stack([pixels[name] for name in names[:3]]))
    assert source.failed == {
        3: "deep/c/broken.png cannot be read: it is not an image that Pillow knows",
        4: "deep/c/large.png cannot be read: it has (7, 5) pixels, the others (6, 6); resize it",
    }
    resized = model_of(images_of(3, 6, 6), preprocessing=Preprocessing((6, 6), "exact").to_json())
    assert read(open_inputs(["deep/c/large.png"], resized)).shape == (1, 3, 6, 6)


@pytest.mark.parametrize("shape", [(1, 6, 6), (6, 6)])
def test_images_to_predict_in_grey(tmp_path, shape, model_of):
    save_image(tmp_path / "a.png")
    grey = save_image(tmp_path / "b.png", mode="L")
    rows = read(open_inputs([str(tmp_path)], model_of(images_of(*shape)))).reshape(2, 6, 6)
    np.testing.assert_array_equal(rows, [np.asarray(Image.open(tmp_path / "a.png").convert("L")), grey])


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


class IsOtherForLargeValues(Mean):
    def forward(self, image: Tensor, items: Tensor) -> Tensor:
        return super().forward(image.clamp(max=1 if torch.compiler.is_compiling() else 255), items)


FIELDS = {"image": {"shape": [3, 4, 4]}, "items": {"dtype": "int32", "is_ragged": True, "n_items": 50}}


@pytest.fixture
def trained(model_of):
    """trained(model) is a model of images and items."""

    def predict(model, batch):
        return {"y": model(batch["image"], batch["items"].values)}

    return lambda model: model_of(FIELDS, model, predict, class_names=["a", "b"], preprocessing="{}")


def check_program(program, text: str) -> None:
    """The program gives the numbers of `Mean`; text: the model.json beside it."""
    card = json.loads(text)
    assert card["inputs"] == ["image", "items"]
    assert card["attributes"] == {"class_names": ["a", "b"], "preprocessing": "{}"}
    for n_rows in (1, 4):
        image = torch.full((n_rows, 3, 4, 4), 7, dtype=torch.uint8)
        items = torch.arange(3 * n_rows, dtype=torch.int32)
        torch.testing.assert_close(program(image, items), Mean()(image, items))


def test_export_gives_the_numbers_of_the_model(tmp_path, trained):
    export(trained(Mean()), tmp_path / "a.pt2")
    texts = {"model.json": ""}
    check_program(torch.export.load(tmp_path / "a.pt2", extra_files=texts).module(), texts["model.json"])


@pytest.mark.slow
def test_export_onnx(tmp_path, trained):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    export(trained(Mean()), tmp_path / "a.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx")
    assert [each.name for each in session.get_inputs()] == ["image", "items"]

    def program(image: Tensor, items: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {"image": image.numpy(), "items": items.numpy()})[0])

    check_program(program, session.get_modelmeta().custom_metadata_map["model.json"])
    assert [path.name for path in tmp_path.iterdir()] == ["a.onnx"]


def test_export_onnx_without_its_packages(tmp_path, trained, monkeypatch):
    def refuse(*_: object, **options: object) -> None:
        raise ImportError("No module named 'onnxscript'")

    monkeypatch.setattr(torch.onnx, "export", refuse)  # as torch does without them
    with pytest.raises(UserError, match=r"a\.onnx was not written: .*onnx.*; pip install .*\[export\]"):
        export(trained(Mean()), tmp_path / "a.onnx")
    assert not any(tmp_path.iterdir())


def test_export_that_fails_is_one_line(tmp_path, trained):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for model, n_bytes, reason in (
        (DependsOnValues(), limits[0], ".+"),
        (IsOtherForLargeValues(), limits[0], "Tensor-likes are not close"),
        (Mean(), 1000, ".*File too large"),
    ):
        resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, limits[1]))
        try:
            with pytest.raises(UserError, match=f"a.pt2 was not written: {reason}") as caught:
                export(trained(model), tmp_path / "a.pt2")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_model_predict_takes_ragged_rows(model_of):
    """As an array for each row, as a `Ragged`, and as rows of a source. Rows without a value are rows, too."""
    field = {"dtype": "float32", "shape": [2], "is_ragged": True}

    def predict(_, batch):
        return {"sum": torch.zeros(len(batch)).index_add(0, batch["x"].rows, batch["x"].values.sum(1))}

    trained = model_of({"x": field}, nn.Linear(1, 1), predict)
    lists = [[[1, 2]], [], np.ones((3, 2))]
    ragged = Ragged.of([torch.tensor(row, dtype=torch.float32).reshape(-1, 2) for row in lists])
    assert ragged.shape == (3, None, 2)
    for rows in (lists, ragged):
        assert trained.predict(x=rows)["sum"].tolist() == [3, 0, 6]
