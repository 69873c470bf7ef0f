"""Image files as inputs, and the predictions of the image workload."""

import json

import h5py
import numpy as np
import predict as script
import pytest
import torch
import train
from harness import ALONE, ROOT, convert, read_rows
from PIL import Image
from torch import nn

from fastgpu.images.column import ImageDecoder
from fastgpu.images.files import Preprocessing
from fastgpu.predict.image_inputs import open_images
from fastgpu.predict.inputs import make_order, open_inputs, open_pools
from fastgpu.predict.model import Trained, check_labelled, load_model
from fastgpu.predict.output import best_of
from fastgpu.process.config_loader import load_config
from fastgpu.process.launch import RankError, UserError
from fastgpu.rows.rows import Field, Rows
from fastgpu.storage.arrays import ArrayDataset
from fastgpu.storage.store import open_store
from workloads.images import Workload

RNG = np.random.default_rng(0)


def color(side: int = 6) -> dict[str, Field]:
    return {"images": Field(np.dtype(np.uint8), (3, side, side))}


def save_image(path, height=6, width=6, mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (height, width, 3) if mode == "RGB" else (height, width)
    pixels = RNG.integers(0, 256, shape).astype(np.uint8)
    Image.fromarray(pixels).save(path)
    return np.moveaxis(pixels, -1, 0) if mode == "RGB" else pixels[None]


def read(source) -> np.ndarray:
    order = make_order(source, 4)
    with open_pools(source, order, ALONE.device) as pools:
        return np.concatenate([rows["images"][: plan.n_real_rows].numpy().copy() for plan, rows in pools])


def test_files_and_encoded_rows_become_the_pixels_that_a_model_was_validated_on(tmp_path):
    paths = []
    for number in range(5):
        paths.append(tmp_path / f"{number}.png")
        save_image(paths[-1], 20 + number, 30)
    with h5py.File(tmp_path / "encoded.h5", "w") as file:
        group = file.create_group("images")
        group.attrs["codec"] = "png"
        group["indptr"] = np.cumsum([0, *(path.stat().st_size for path in paths)])
        group["values"] = np.frombuffer(b"".join(path.read_bytes() for path in paths), np.uint8)
    validated = ImageDecoder((8, 8), 0.25).decoded(open_store("x", str(tmp_path / "encoded.h5"), {"images": "images"}))
    expected = read_rows(validated)["images"]
    card = {"attributes": validated.attributes, "fields": {"images": {"dataset": "images"}}}
    for inputs in (list(map(str, paths)), [str(tmp_path / "encoded.h5")]):
        found = read(open_inputs(inputs, card, color(8), "stop").source)
        np.testing.assert_array_equal(found, expected)


def test_image_files_of_16_bits_are_told(tmp_path):
    for number in range(3):
        Image.fromarray(np.full((6, 6), 4095, np.uint16)).save(tmp_path / f"{number}.png")
    inputs = open_inputs([str(tmp_path)], {"attributes": {}}, color(), "stop")
    np.testing.assert_array_equal(read(inputs.source), np.full((3, 3, 6, 6), 15))
    (line,) = inputs.remarks(range(3))
    assert line.startswith("changed  16 bits to 8 (")
    assert line.endswith("): 3 of 3 images")


# ---------------------------------------------------------------------------------------------- files


def test_files_folders_and_globs_in_their_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("z.png", "deep/b/2.png", "deep/a/1.png", "deep/.hidden.png"):
        save_image(tmp_path / name)
    (tmp_path / "deep/notes.txt").touch()
    source = open_images(["z.png", "deep", "deep/?/*.png"], None, color(), "stop")
    assert list(map(str, source.files.paths)) == [
        "z.png",
        "deep/a/1.png",
        "deep/b/2.png",
        "deep/a/1.png",
        "deep/b/2.png",
    ]
    with pytest.raises(UserError, match=r"none/\*.png: no image files"):
        open_images(["none/*.png"], None, color(), "stop")
    (tmp_path / "deep/a/loop").symlink_to("..")
    assert len(open_images(["deep"], None, color(), "stop")) == 2


def test_rows_are_the_pixels_of_the_files(tmp_path):
    names = [str(tmp_path / f"{number}.png") for number in range(11)]
    expected = np.stack([save_image(tmp_path / f"{number}.png") for number in range(11)])
    np.testing.assert_array_equal(read(open_images(names, None, color(), "stop")), expected)


@pytest.mark.parametrize("shape", [(1, 6, 6), (6, 6)])
def test_a_model_of_one_channel_gets_grey_as_pillow_makes_it(tmp_path, capsys, shape):
    save_image(tmp_path / "a.png")
    grey = save_image(tmp_path / "b.png", mode="L")
    fields = {"images": Field(np.dtype(np.uint8), shape)}
    rows = read(open_images([str(tmp_path)], None, fields, "stop"))
    np.testing.assert_array_equal(rows[0].reshape(6, 6), np.asarray(Image.open(tmp_path / "a.png").convert("L")))
    np.testing.assert_array_equal(rows[1].reshape(1, 6, 6), grey)
    assert "takes one channel: colors become grey" in capsys.readouterr().out


def test_a_broken_image_stops_or_is_written_as_such(tmp_path):
    save_image(tmp_path / "0.png")
    (tmp_path / "1.png").write_text("no image")
    names = [str(tmp_path / f"{number}.png") for number in range(3)]
    with pytest.raises(
        RankError, match=r"1.png cannot be read: it is not an image that Pillow knows; --on-error skip goes on"
    ):
        read(open_images(names[:2], None, color(), "stop"))
    source = open_images(names, None, color(), "skip")
    read(source)
    assert source.failed[1] == "it is not an image that Pillow knows"
    assert source.failed[2].startswith("[Errno 2] No such file or directory")


def test_sizes_must_match_if_nobody_says_how_to_resize(tmp_path):
    save_image(tmp_path / "a.png", 7, 5)
    with pytest.raises(
        RankError,
        match="a.png cannot be read: it has 7x5 pixels, the model takes 6x6, and its training file does not say",
    ):
        read(open_images([str(tmp_path)], None, color(), "stop"))
    resized = read(open_images([str(tmp_path)], Preprocessing((6, 6), "exact").to_json(), color(), "stop"))
    assert resized.shape == (1, 3, 6, 6)


@pytest.mark.parametrize("field", [Field(np.dtype(np.float32), (3, 6, 6)), Field(np.dtype(np.uint8), (4, 6, 6))])
def test_models_that_take_no_image_files_say_so(field):
    with pytest.raises(UserError, match=r"the model takes images, .*, not image files; give a .npy or an HDF5 file"):
        open_inputs(["a.png"], {"attributes": {}}, {"images": field}, "stop")


# ---------------------------------------------------------------------------------------------- the workload


def make_workload(has_attributes=False, **attributes) -> Workload:
    labels = np.zeros((4, 3) if has_attributes else 4, np.int64)
    source = ArrayDataset("made up", {"images": np.zeros((4, 3, 8, 8), np.uint8), "labels": labels}, attributes)
    return Workload(Workload.Options(width=4), source, source)


def test_predictions_of_classes_and_attributes():
    batch = Rows({"images": torch.from_numpy(RNG.integers(0, 256, (5, 3, 8, 8)).astype(np.uint8))})
    workload = make_workload(n_classes=4)
    model = workload.model().eval()
    probabilities = model(batch["images"]).softmax(1)
    predicted = workload.predict(model, batch)
    best = best_of(predicted, None)
    assert torch.equal(best["class"], probabilities.argmax(1))
    assert torch.equal(best["probability"], probabilities.max(1).values)
    best = best_of(predicted, 4)
    assert best["class"].shape == best["probability"].shape == (5, 4)
    torch.testing.assert_close(best["probability"].sum(1), torch.ones(5))
    with pytest.raises(UserError, match="--top is 5, but this model has 4 to rank; allowed is 1 to 4"):
        best_of(predicted, 5)
    workload = make_workload(has_attributes=True, class_names=["young", "smiles", "hat"])
    model = workload.model().eval()
    predicted = workload.predict(model, batch)
    assert list(predicted) == ["young", "smiles", "hat"]
    torch.testing.assert_close(torch.stack(list(predicted.values()), 1), model(batch["images"]).sigmoid())


def test_labels_to_evaluate_are_checked_as_those_of_validation_rows():
    card = {
        "workload": "images",
        "options": {"width": 4},
        "attributes": {"n_classes": 4},
        "fields": {
            "images": {"dtype": "uint8", "shape": [3, 8, 8], "is_ragged": False, "n_items": None},
            "labels": {"dtype": "int64", "shape": [], "is_ragged": False, "n_items": None},
        },
    }
    trained = Trained(nn.Identity(), make_workload(n_classes=4), card)
    images = np.zeros((2, 3, 8, 8), np.uint8)
    check_labelled(trained, ArrayDataset("more bytes", {"images": images, "labels": np.array([0, 3])}))
    check_labelled(trained, ArrayDataset("fewer bytes", {"images": images, "labels": np.array([0, 3], np.uint8)}))
    with pytest.raises(UserError, match=r"made up: labels are \[9\] in 1 of 2 rows; allowed are 0 to 3"):
        check_labelled(trained, ArrayDataset("made up", {"images": images, "labels": np.array([0, 9])}))


@pytest.mark.slow
def test_photos_are_predicted_as_the_rows_that_the_converter_made_of_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in range(40):
        save_image(tmp_path / f"photos/{'ab'[number % 2]}/{number:02d}.png", 20 + number, 40 - number // 2)
    done = convert("images", "photos", "x.h5", "--size", "8", "--split", "0.5", "--keep-order", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with h5py.File("x-train.h5", "a") as file:
        file.attrs.setdefault("preprocessing", Preprocessing((8, 8)).to_json())
    options = ["workload=images", "data.train=x-train.h5", "data.val=x-val.h5", "model.width=4", "data.batch_size=8"]
    (tmp_path / "empty.yaml").write_text("data: {fields: {images: images, labels: labels}}\n")
    config = load_config(["--config", "empty.yaml", *options, "run.name=a", "train.epochs=1", "dist.device=cpu"])
    train.train(train.build(config, ALONE), ALONE)
    script.main(script.parse(["runs/a", "photos", "-o", "x.jsonl"]), ALONE, None)
    lines = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert [line["file"] for line in lines] == sorted(line["file"] for line in lines)
    assert {line["class_name"] for line in lines} <= {"a", "b"}
    model, _, _ = load_model(next((tmp_path / "runs/a/checkpoints").glob("best-*")))
    converted = []
    for name in ("x-train.h5", "x-val.h5"):
        with h5py.File(name) as file:
            converted += model(torch.from_numpy(file["images"][:])).softmax(1).max(1).values.tolist()
    found = sorted(line["probability"] for line in lines)
    np.testing.assert_allclose(found, sorted(converted), rtol=1e-5)
    assert ROOT  # the converter ran from there
