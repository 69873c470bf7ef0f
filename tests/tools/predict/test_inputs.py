"""HDF5 files, arrays and image files as rows to predict."""

import h5py
import numpy as np
import pytest
import scipy.sparse
from harness import ALONE, is_ragged, numbered, numbers_of, read_rows
from PIL import Image

from fastgpu.images.column import decoded
from fastgpu.images.parts import Preprocessing
from fastgpu.predict.inputs import open_inputs, open_pools
from fastgpu.process.launch import UserError
from fastgpu.storage.store import open_store

RNG = np.random.default_rng(0)


def card(name="x", dtype="uint8", shape=(1, 4, 2), n_items=None, dataset=None, **attributes):
    """A model.json of one field."""
    field = {"dtype": dtype, "shape": shape, "is_ragged": n_items is not None, "n_items": n_items}
    return {"fields": {name: field | {"dataset": dataset or name}}, "attributes": attributes}


def color(side=6, **attributes):
    return card("images", shape=(3, side, side), **attributes)


def read(source, name="x"):
    with open_pools(source, 4, ALONE.device) as pools:
        return np.concatenate([rows[name][: plan.n_real_rows].numpy().copy() for plan, rows in pools])


def test_rows_come_in_the_order_of_the_files(write):
    paths = [write(20, name="a.h5"), write(15, name="b.h5", start=20)]
    assert numbers_of(read(open_inputs(paths, card(dataset="images"), ["x"]))) == list(range(35))


def test_single_whole_numbers_may_have_another_size(tmp_path):
    path = str(tmp_path / "x.h5")
    with h5py.File(path, "w") as file:
        file["y"] = np.arange(5, dtype=np.uint8)
        file["x"] = np.zeros((5, 2), np.uint16)
    open_inputs([path], card("y", "int64", ()), ["y"])
    with pytest.raises(UserError, match=r"x is uint16 \(N, 2\); the model was trained on uint8 \(N, 2\)"):
        open_inputs([path], card(shape=(2,)), ["x"])


def test_ragged_rows(write_ragged):
    source = open_inputs([write_ragged(50)], card("items", "int32", (), 1000), ["items"])
    with open_pools(source, 50, ALONE.device) as pools:
        assert is_ragged(next(pools).rows["items"], range(50))
    with pytest.raises(UserError, match=r"below 1000; the model was trained on .* below 60"):
        open_inputs([write_ragged(50)], card("items", "int32", (), 60), ["items"])


def test_array_files(tmp_path):
    np.save(tmp_path / "x.npy", numbered(9))
    np.savez(tmp_path / "x.npz", x=numbered(9), other=np.zeros(2))
    for name in ("x.npy", "x.npz"):
        assert numbers_of(read(open_inputs([str(tmp_path / name)], card(), ["x"]))) == list(range(9))
    np.savez(tmp_path / "few.npz", x=numbered(9), id=np.zeros(8))
    np.save(tmp_path / "objects.npy", np.array([None, {}]))
    (tmp_path / "text.npy").write_text("no array")
    (tmp_path / "crc.npz").write_bytes((tmp_path / "x.npz").read_bytes().replace(numbered(9).tobytes(), bytes(72)))
    scipy.sparse.save_npz(tmp_path / "m.npz", scipy.sparse.eye_array(9, format="csr"))
    for names, fields, message in (
        ("m.npz", "x", "m.npz should hold NumPy arrays x of equal length: 'x is not a file"),
        ("text.npy", "x", "text.npy should hold NumPy arrays x"),
        ("crc.npz", "x", "crc.npz should hold NumPy arrays x of equal length: Bad CRC-32"),
        ("gone.npy", "x", "gone.npy should hold NumPy arrays x of equal length: .*No such file"),
        ("objects.npy", "x", "objects.npy should hold NumPy arrays x"),
        ("few.npz", "x id", "few.npz should hold NumPy arrays x and id of equal length"),
        ("x.npy", "x id", "x.npy should hold NumPy arrays x and id of equal length: 'id'"),
        ("x.npy x.npy", "x", "x.npy is not an HDF5 file, nor a single NumPy file, with x"),
    ):
        with pytest.raises(UserError, match=message):
            open_inputs([str(tmp_path / name) for name in names.split()], card(shape=(8,)), fields.split())


# ---------------------------------------------------------------------------------------------- image files


def save_image(path, height=6, width=6, mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = RNG.integers(0, 256, (height, width, 3) if mode == "RGB" else (height, width)).astype(np.uint8)
    Image.fromarray(pixels).save(path)
    return np.moveaxis(pixels, -1, 0) if mode == "RGB" else pixels


def test_files_and_encoded_rows_become_the_pixels_that_a_model_was_validated_on(tmp_path):
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
    for inputs in (list(map(str, paths)), [str(tmp_path / "encoded.h5")]):
        found = read(open_inputs(inputs, color(8, **validated.attributes), ["images"]), "images")
        np.testing.assert_array_equal(found, expected)


def test_files_and_folders_in_their_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ["z.png", "deep/a/1.png", "deep/b/2.png"]
    pixels = {name: save_image(tmp_path / name) for name in reversed(names)}
    save_image(tmp_path / "deep/.hidden.png")
    (tmp_path / "deep/notes.txt").touch()
    (tmp_path / "deep/a/loop").symlink_to("..")
    source = open_inputs(["z.png", "deep"], color(), ["images"])
    assert list(map(str, source.files)) == names
    np.testing.assert_array_equal(read(source, "images"), np.stack([pixels[name] for name in names]))


@pytest.mark.parametrize("shape", [(1, 6, 6), (6, 6)])
def test_a_model_of_one_channel_gets_grey_as_pillow_makes_it(tmp_path, shape):
    save_image(tmp_path / "a.png")
    grey = save_image(tmp_path / "b.png", mode="L")
    rows = read(open_inputs([str(tmp_path)], card("images", shape=shape), ["images"]), "images")
    np.testing.assert_array_equal(rows[0].reshape(6, 6), np.asarray(Image.open(tmp_path / "a.png").convert("L")))
    np.testing.assert_array_equal(rows[1].reshape(6, 6), grey)


def test_broken_images_are_told(tmp_path):
    Image.fromarray(np.full((6, 6), 4095, np.uint16)).save(tmp_path / "0.png")
    (tmp_path / "1.png").write_text("no image")
    save_image(tmp_path / "2.png", 7, 5)
    source = open_inputs([str(tmp_path / f"{number}.png") for number in range(3)], color(), ["images"])
    assert (read(source, "images")[0] == 15).all()
    assert sorted(source.failed) == [1, 2]
    assert "1.png cannot be read: it is not an image that Pillow knows" in source.failed[1]
    assert "2.png cannot be read: it has (7, 5) pixels, the others (6, 6); resize it" in source.failed[2]
    resized = color(preprocessing=Preprocessing((6, 6), "exact").to_json())
    assert read(open_inputs([str(tmp_path / "2.png")], resized, ["images"]), "images").shape == (1, 3, 6, 6)


@pytest.mark.parametrize(
    "other",
    [card("images", "float32", (3, 6, 6)), card("images", shape=(6,))],
)
def test_models_that_take_no_image_files_say_so(other):
    with pytest.raises(UserError, match="a.png is not an HDF5 file, nor a single NumPy file, with images"):
        open_inputs(["a.png"], other, ["images"])
