"""HDF5 files, arrays and image files as rows to predict."""

import h5py
import numpy as np
import pytest
from harness import ALONE, is_ragged, numbered, numbers_of, read_rows
from PIL import Image

from fastgpu.images.column import decoded
from fastgpu.images.parts import Preprocessing
from fastgpu.predict.model import open_inputs, open_pools
from fastgpu.storage.store import open_store

RNG = np.random.default_rng(0)


def read(source, name="images"):
    with open_pools(source, 4, ALONE.device) as pools:
        return np.concatenate([rows[name][: plan.n_real_rows].numpy().copy() for plan, rows in pools])


def test_rows_come_in_the_order_of_the_files_from_the_dataset_of_training_or_the_array_of_its_field(
    tmp_path, write, model_of
):
    np.save(tmp_path / "x.npy", numbered(35))
    np.savez(tmp_path / "x.npz", other=np.zeros(2), x=numbered(35))
    trained = model_of({"x": {"shape": [1, 4, 2], "dataset": "images"}})
    files = [write(20, name="a.h5"), write(15, name="b.h5", start=20)]
    for paths in (files, [f"{tmp_path}/x.npy"], [f"{tmp_path}/x.npz"]):
        assert numbers_of(read(open_inputs(paths, trained), "x")) == list(range(35))


def test_single_numbers_may_have_another_type_and_rows_any_number_of_values(tmp_path, write_ragged, model_of):
    np.save(tmp_path / "y.npy", np.arange(5, dtype=np.uint16))
    assert read(open_inputs([f"{tmp_path}/y.npy"], model_of({"y": {"dtype": "int64"}})), "y").tolist() == [*range(5)]
    items = {"dtype": "int32", "is_ragged": True, "n_items": 1000}
    with open_pools(open_inputs([write_ragged(50)], model_of({"items": items})), 50, ALONE.device) as pools:
        assert is_ragged(next(pools).rows["items"], range(50))


# ---------------------------------------------------------------------------------------------- image files


def images_of(*shape):
    return {"images": {"shape": shape}}


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
    trained = model_of(images_of(3, 8, 8), **validated.attributes)
    for inputs in ([*map(str, paths)], [f"{tmp_path}/encoded.h5"]):
        np.testing.assert_array_equal(read(open_inputs(inputs, trained)), read_rows(validated)["images"])


def test_files_and_folders_come_in_their_order_and_broken_images_are_told(tmp_path, monkeypatch, model_of):
    monkeypatch.chdir(tmp_path)
    names = ["z.png", "deep/a/1.png", "deep/b/2.png", "deep/c/broken.png", "deep/c/large.png"]
    pixels = {name: save_image(tmp_path / name) for name in names[2::-1]}
    save_image(tmp_path / "deep/c/large.png", 7, 5)
    (tmp_path / "deep/c/broken.png").write_text("no image")
    (tmp_path / "deep/notes.txt").touch()
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
def test_a_model_of_one_channel_gets_grey_as_pillow_makes_it(tmp_path, shape, model_of):
    save_image(tmp_path / "a.png")
    grey = save_image(tmp_path / "b.png", mode="L")
    rows = read(open_inputs([str(tmp_path)], model_of(images_of(*shape)))).reshape(2, 6, 6)
    np.testing.assert_array_equal(rows, [np.asarray(Image.open(tmp_path / "a.png").convert("L")), grey])
