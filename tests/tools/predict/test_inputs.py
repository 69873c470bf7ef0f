"""HDF5 files, arrays and image files as rows to predict."""

import h5py
import numpy as np
import pytest
from harness import ALONE, is_ragged, numbered, numbers_of, read_rows
from PIL import Image

from fastgpu.images.column import decoded
from fastgpu.images.parts import Preprocessing
from fastgpu.predict.inputs import open_inputs, open_pools
from fastgpu.storage.store import open_store

RNG = np.random.default_rng(0)
NUMBERED = {"x": {"shape": [1, 4, 2]}}
"""A field of rows that are numbered."""


def read(source, name="x"):
    with open_pools(source, 4, ALONE.device) as pools:
        return np.concatenate([rows[name][: plan.n_real_rows].numpy().copy() for plan, rows in pools])


def test_rows_come_in_the_order_of_the_files_from_the_dataset_of_training(write, model_of):
    paths = [write(20, name="a.h5"), write(15, name="b.h5", start=20)]
    trained = model_of({"x": NUMBERED["x"] | {"dataset": "images"}})
    assert numbers_of(read(open_inputs(paths, trained))) == list(range(35))


def test_single_numbers_may_have_another_type(tmp_path, model_of):
    with h5py.File(tmp_path / "y.h5", "w") as file:
        file["y"] = np.arange(5, dtype=np.uint16)
    assert read(open_inputs([f"{tmp_path}/y.h5"], model_of({"y": {"dtype": "int64"}})), "y").tolist() == [*range(5)]


def test_ragged_rows(write_ragged, model_of):
    items = {"dtype": "int32", "is_ragged": True, "n_items": 1000}
    with open_pools(open_inputs([write_ragged(50)], model_of({"items": items})), 50, ALONE.device) as pools:
        assert is_ragged(next(pools).rows["items"], range(50))


def test_array_files(tmp_path, model_of):
    np.save(tmp_path / "x.npy", numbered(9))
    np.savez(tmp_path / "x.npz", other=np.zeros(2), x=numbered(9))
    for name in ("x.npy", "x.npz"):
        assert numbers_of(read(open_inputs([f"{tmp_path}/{name}"], model_of(NUMBERED)))) == list(range(9))


# ---------------------------------------------------------------------------------------------- image files


def color(side=6):
    return {"images": {"shape": [3, side, side]}}


def save_image(path, height=6, width=6, mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = RNG.integers(0, 256, (height, width, 3) if mode == "RGB" else (height, width)).astype(np.uint8)
    Image.fromarray(pixels).save(path)
    return np.moveaxis(pixels, -1, 0) if mode == "RGB" else pixels


def test_files_and_encoded_rows_become_the_pixels_that_a_model_was_validated_on(tmp_path, model_of):
    paths = [tmp_path / f"{number}.png" for number in range(5)]
    for number, path in enumerate(paths):
        save_image(path, 20 + number, 30)
    with h5py.File(tmp_path / "encoded.h5", "w") as file:
        group = file.create_group("images")
        group.attrs["codec"] = "png"
        group["indptr"] = np.cumsum([0, *(path.stat().st_size for path in paths)])
        group["values"] = np.frombuffer(b"".join(path.read_bytes() for path in paths), np.uint8)
    validated = decoded(open_store("x", str(tmp_path / "encoded.h5"), {"images": "images"}), (8, 8), min_scale=0.25)
    expected = read_rows(validated)["images"]
    for inputs in ([*map(str, paths)], [f"{tmp_path}/encoded.h5"]):
        found = read(open_inputs(inputs, model_of(color(8), **validated.attributes)), "images")
        np.testing.assert_array_equal(found, expected)


def test_files_and_folders_in_their_order(tmp_path, monkeypatch, model_of):
    monkeypatch.chdir(tmp_path)
    names = ["z.png", "deep/a/1.png", "deep/b/2.png"]
    pixels = {name: save_image(tmp_path / name) for name in reversed(names)}
    (tmp_path / "deep/notes.txt").touch()
    source = open_inputs(["z.png", "deep"], model_of(color()))
    assert source.files == names
    np.testing.assert_array_equal(read(source, "images"), np.stack([pixels[name] for name in names]))


@pytest.mark.parametrize("shape", [(1, 6, 6), (6, 6)])
def test_a_model_of_one_channel_gets_grey_as_pillow_makes_it(tmp_path, shape, model_of):
    save_image(tmp_path / "a.png")
    grey = save_image(tmp_path / "b.png", mode="L")
    rows = read(open_inputs([str(tmp_path)], model_of({"images": {"shape": shape}})), "images")
    np.testing.assert_array_equal(rows[0].reshape(6, 6), np.asarray(Image.open(tmp_path / "a.png").convert("L")))
    np.testing.assert_array_equal(rows[1].reshape(6, 6), grey)


def test_broken_images_are_told(tmp_path, monkeypatch, model_of):
    monkeypatch.chdir(tmp_path)
    first = save_image(tmp_path / "0.png")
    (tmp_path / "1.png").write_text("no image")
    save_image(tmp_path / "2.png", 7, 5)
    source = open_inputs(["0.png", "1.png", "2.png"], model_of(color()))
    np.testing.assert_array_equal(read(source, "images")[0], first)
    assert source.failed == {
        1: "1.png cannot be read: it is not an image that Pillow knows",
        2: "2.png cannot be read: it has (7, 5) pixels, the others (6, 6); resize it",
    }
    resized = model_of(color(), preprocessing=Preprocessing((6, 6), "exact").to_json())
    assert read(open_inputs(["2.png"], resized), "images").shape == (1, 3, 6, 6)
