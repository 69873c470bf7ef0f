from pathlib import Path

import h5py
import numpy as np
import pytest

from fastgpu.storage.hdf5 import attributes_of

RNG = np.random.default_rng(0)
USAGE = ["Training", "PublicTest", "Training", "PrivateTest"]


def pixels_of(rows: int, count: int) -> np.ndarray:
    """Each row begins with its number."""
    pixels = RNG.integers(0, 256, (rows, count))
    pixels[:, 0] = np.arange(rows)
    return pixels


def write_fer(path: Path, pixels: np.ndarray, quote: str = "") -> None:
    lines = [f"{n % 3},{quote}{' '.join(map(str, row))}{quote},{USAGE[n % 4]}" for n, row in enumerate(pixels)]
    path.write_text("\n".join(["emotion,pixels,Usage", *lines]) + "\n\n")


def write_mnist(path: Path, pixels: np.ndarray, separator: str = ",") -> None:
    names = ["label", *(f"pixel{n}" for n in range(pixels.shape[1]))]
    lines = [separator.join(map(str, [n % 10, *row])) for n, row in enumerate(pixels)]
    path.write_text("\r\n".join([separator.join(names), *lines]), encoding="utf-8-sig", newline="")


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
    write_fer(tmp_path / "fer.csv", pixels, quote)
    convert("pixels fer.csv fer.h5 --split-by Usage")
    for split, words in (("train", ("Training",)), ("val", ("PublicTest",)), ("test", ("PrivateTest",))):
        numbers = check(tmp_path / f"fer-{split}.h5", pixels, (1, 6, 6), 3)
        assert sorted(numbers) == [n for n in range(40) if USAGE[n % 4] in words]


@pytest.mark.parametrize("separator", [",", ";"])
def test_pixels_in_a_column_each(tmp_path, convert, separator):
    pixels = pixels_of(50, 25)
    write_mnist(tmp_path / "mnist.csv", pixels, separator)
    convert("pixels mnist.csv mnist.h5 --split 0.8")
    parts = [check(tmp_path / f"mnist-{part}.h5", pixels, (1, 5, 5), 10) for part in ("train", "val")]
    assert sorted(parts[0] + parts[1]) == list(range(50))


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        ("label,pixels\n1,1 2 3 4\n1,1 2 3 256\n", (), "x.csv:3: pixels is '1 2 3 256'; it should be 4 whole numbers"),
        ("label,pixels\n1,1 2 3 4\n1,1 2 3 -1\n", (), "x.csv:3: pixels is"),
        ("label,pixels\n1,1 2 3 4\n1,1 2 3 x\n", (), "x.csv:3: pixels is"),
        ("label,pixels\n1,1 2 3 4\n1,1 2 3 1.5\n", (), "x.csv:3: pixels is"),
        ("label,pixels\n1,1 2 3 4\n1,1 2 3\n", (), "x.csv:3: pixels is"),
        ("label,p0,p1,p2,p3\n1,0.5,0,0,1\n", (), "x.csv:2: p0 is '0.5'; it should be a whole number from 0 to 255"),
        ("label,p0,p10,p11,p2\n1,1,2,3,4\n", (), "columns of pixels in another order than their numbers"),
        (
            "emotion,pixels,Usage\n1,1 2 3 4,x\n",
            (),
            "has the columns emotion, pixels, Usage; name that of the label by --label",
        ),
        ("pixels\n1 2 3 4\n", (), "has the columns pixels; name that of the label by --label"),
        ("label,pixels\n1,1 2 3\n", (), "has 3 pixels in a row, which are no square"),
        ("label,pixels\n1,1 2 3 4\n,1 2 3 4\n", (), "x.csv:3: label is ''; it is missing"),
        ("5,0,0,0,1\n", (), "has the columns 5, 0, 0, 0, 1; name that of the label by --label"),
        ("label,pixels\n1,1 2 3 4\n", ("--split-by", "Usage"), "has the columns label, pixels, and not one Usage"),
    ],
)
def test_a_table_that_is_not_understood_is_one_line(tmp_path, convert, text, flags, message):
    (tmp_path / "x.csv").write_text(text)
    result = convert("pixels", "x.csv", "x.h5", *flags, code=2)
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "x.h5").exists()


def test_other_columns_are_left_out_if_the_label_is_named(tmp_path, convert):
    rows = ['very sad,"a note",1 2 3 4', "very sad,b,5 6 7 8", "glad,c,9 10 11 12"]
    (tmp_path / "a.csv").write_text("\n".join(["mood , note, pixels", *rows]), encoding="utf-8-sig")
    convert("pixels a.csv a.h5 --label ' mood' --keep-order")
    with h5py.File(tmp_path / "a.h5") as file:
        assert file["images"][:, 0, 0, 0].tolist() == [1, 5, 9]
        assert file["labels"][:].tolist() == [1, 1, 0]
        assert attributes_of(file)["class_names"] == ["glad", "very sad"]
