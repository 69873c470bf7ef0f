from pathlib import Path

import h5py
import numpy as np
import pytest

from fastgpu.storage.hdf5 import attributes_of

USAGE = ["Training", "PublicTest", "Training", "PrivateTest"]


def pixels_of(rows: int, count: int) -> np.ndarray:
    """Each row begins with its number."""
    pixels = np.random.default_rng(0).integers(0, 256, (rows, count))
    pixels[:, 0] = np.arange(rows)
    return pixels


def check(path: Path, pixels: np.ndarray, shape: tuple[int, ...], n_classes: int) -> list[int]:
    """The numbers of the rows of a file, which must hold these pixels."""
    with h5py.File(path) as file:
        images = file["images"][:]
        numbers = images.reshape(len(images), -1)[:, 0].tolist()
        np.testing.assert_array_equal(images, pixels[numbers].reshape(-1, *shape))
        assert file["labels"][:].tolist() == [number % n_classes for number in numbers]
        assert attributes_of(file)["class_names"] == [str(number) for number in range(n_classes)]
    return numbers


@pytest.mark.parametrize("quote", ["", '"'])
def test_pixels_in_one_column_with_a_column_for_the_split(tmp_path, convert, quote):
    pixels = pixels_of(40, 36)
    lines = [f"{n % 3},{quote}{' '.join(map(str, row))}{quote},{USAGE[n % 4]}" for n, row in enumerate(pixels)]
    (tmp_path / "fer.csv").write_text("\n".join(["emotion,pixels,Usage", *lines]) + "\n\n")
    convert("pixels fer.csv fer.h5 --split-by Usage")
    for split, word in (("train", "Training"), ("val", "PublicTest"), ("test", "PrivateTest")):
        numbers = check(tmp_path / f"fer-{split}.h5", pixels, (1, 6, 6), 3)
        assert sorted(numbers) == [n for n in range(40) if USAGE[n % 4] == word]


@pytest.mark.parametrize("separator", [",", ";"])
def test_pixels_in_a_column_each(tmp_path, convert, separator):
    pixels = pixels_of(50, 25)
    names = ["label", *(f"pixel{n}" for n in range(25))]
    lines = [separator.join(map(str, [n % 10, *row])) for n, row in enumerate(pixels)]
    text = "\r\n".join([separator.join(names), *lines])
    (tmp_path / "mnist.csv").write_text(text, encoding="utf-8-sig", newline="")
    convert("pixels mnist.csv mnist.h5 --split 0.8")
    parts = [check(tmp_path / f"mnist-{part}.h5", pixels, (1, 5, 5), 10) for part in ("train", "val")]
    assert sorted(parts[0] + parts[1]) == list(range(50))


def test_other_columns_are_left_out_if_the_label_is_named(tmp_path, convert):
    rows = ['very sad,"a note",1 2 3 4', "very sad,b,5 6 7 8", "glad,c,9 10 11 12"]
    (tmp_path / "a.csv").write_text("\n".join(["mood , note, pixels", *rows]), encoding="utf-8-sig")
    convert("pixels a.csv a.h5 --label ' mood' --keep-order")
    with h5py.File(tmp_path / "a.h5") as file:
        assert file["images"][:, 0, 0, 0].tolist() == [1, 5, 9]
        assert file["labels"][:].tolist() == [1, 1, 0]
        assert attributes_of(file)["class_names"] == ["glad", "very sad"]
