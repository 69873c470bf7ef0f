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


def write_mnist(path: Path, pixels: np.ndarray, delimiter: str = ",") -> None:
    names = ["label", *(f"pixel{n}" for n in range(pixels.shape[1]))]
    lines = [delimiter.join(map(str, [n % 10, *row])) for n, row in enumerate(pixels)]
    path.write_text("\r\n".join([delimiter.join(names), *lines]), encoding="utf-8-sig", newline="")


def check(path: Path, pixels: np.ndarray, shape: tuple[int, ...], n_classes: int) -> list[int]:
    """The numbers of the rows of a file, which must hold these pixels."""
    with h5py.File(path) as file:
        images = file["images"][:]
        numbers = images.reshape(len(images), -1)[:, 0].tolist()
        np.testing.assert_array_equal(images, pixels[numbers].reshape(-1, *shape))
        assert file["labels"][:].tolist() == [number % n_classes for number in numbers]
        assert attributes_of(file, "")["class_names"] == [str(number) for number in range(n_classes)]
    return numbers


@pytest.mark.parametrize("quote", ["", '"'])
def test_pixels_in_one_column_with_a_column_for_the_split(tmp_path, convert, quote):
    pixels = pixels_of(40, 36)
    write_fer(tmp_path / "fer.csv", pixels, quote)
    result = convert("pixels", "fer.csv", "fer.h5", "--split-by", "Usage")
    assert result.returncode == 0, result.stderr
    assert "36 pixels in a row are taken for 1x6x6" in result.stdout
    for split, words in (("train", ("Training",)), ("val", ("PublicTest",)), ("test", ("PrivateTest",))):
        numbers = check(tmp_path / f"fer-{split}.h5", pixels, (1, 6, 6), 3)
        assert sorted(numbers) == [n for n in range(40) if USAGE[n % 4] in words]


def test_spaces_around_names_mean_nothing(tmp_path, convert):
    (tmp_path / "words.csv").write_text("mood , pixels\nvery sad,1 2 3 4\nvery sad,5 6 7 8\n")
    result = convert("pixels", "words.csv", "words.h5", "--label", " mood")
    assert result.returncode == 0, result.stderr
    with h5py.File(tmp_path / "words.h5") as file:
        assert attributes_of(file, "")["class_names"] == ["very sad"]


@pytest.mark.parametrize("delimiter", [",", ";"])
def test_pixels_in_a_column_each(tmp_path, convert, delimiter):
    pixels = pixels_of(50, 24)
    write_mnist(tmp_path / "mnist.csv", pixels, delimiter)
    result = convert("pixels", "mnist.csv", "mnist.h5", "--shape", "2x3x4", "--split", "0.8")
    assert result.returncode == 0, result.stderr
    numbers = [
        number for part in ("train", "val") for number in check(tmp_path / f"mnist-{part}.h5", pixels, (2, 3, 4), 10)
    ]
    assert sorted(numbers) == list(range(50))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (" ", " 256 ", "bad.csv:3: a pixel is 256; allowed are 0 to 255"),
        (" ", " 1.5 ", "bad.csv:3: the pixels are not whole numbers"),
        (" ", " x ", "bad.csv:3: the pixels are not whole numbers"),
        (" ", " -1 ", "bad.csv:3: a pixel is -1; allowed are 0 to 255"),
        (" ", " 7 ", "bad.csv:3: 17 pixels, but the first row has 16"),
    ],
)
def test_wrong_pixels_are_named_with_their_line(tmp_path, convert, old, new, message):
    write_fer(tmp_path / "fer.csv", pixels_of(250, 16))
    lines = (tmp_path / "fer.csv").read_text().splitlines()
    label, pixels, usage = lines[2].split(",")
    lines[2] = ",".join([label, pixels.replace(old, new, 1), usage])
    (tmp_path / "bad.csv").write_text("\n".join(lines))
    result = convert("pixels", "bad.csv", "x.h5", "--label", "emotion", "--split-by", "Usage")
    assert result.returncode == 2
    assert message in result.stderr
    assert not list(tmp_path.glob("*.h5"))


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        (
            "emotion,pixels,Usage\n1,1 2 3 4,x\n",
            (),
            "has the columns emotion, pixels, Usage; it should have columns of pixels",
        ),
        ("pixels\n1 2 3 4\n", (), "has the columns pixels; it should have columns of pixels"),
        ("label,pixels\n1,1 2 3\n", (), "has 3 pixels in a row, which is no square; give --shape"),
        ("label,pixels\n1,1 2 3 4\n", ("--shape", "1x3x3"), "has 4 pixels in a row, but --shape has 9"),
        ("label,pixels\n1,1 2 3 99999999999999999999\n", (), "x.csv:2: the pixels are not whole numbers"),
        ("label,pixels\n1,1 2 3 4\n1,2,3\n", (), "x.csv:3: 3 columns; its header has 2; put quotes around"),
        ("label,pixels\n1,1 2 3 4\n,1 2 3 4\n", (), "x.csv:3: label is missing"),
        ("label,pixels\n", (), "has no rows below its header"),
        ("5,0,0,0,1\n", (), "has numbers in its first line, which should name the columns"),
        ("label,pixels\n1,1 2 3 4\n", ("--split-by", "Usage"), "has the columns label, pixels, and not one Usage"),
    ],
)
def test_a_table_that_is_not_understood_is_one_line(tmp_path, convert, text, flags, message):
    (tmp_path / "x.csv").write_text(text)
    result = convert("pixels", "x.csv", "x.h5", *flags)
    assert result.returncode == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_columns_of_pixels_that_were_sorted_by_name_are_refused(tmp_path, convert):
    """pixel10 comes before pixel2: the images would be scrambled without a word."""
    names = ["label", *sorted(f"pixel{n}" for n in range(16))]
    rows = [",".join(["1", *map(str, range(16))])] * 4
    (tmp_path / "a.csv").write_text("\n".join([",".join(names), *rows]))
    result = convert("pixels", "a.csv", "a.h5")
    assert result.returncode == 2
    assert "has columns of pixels in another order than their numbers" in result.stderr


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_lines_end_where_the_table_says(tmp_path, convert, end):
    rows = ['2,"a note",1 2 3 4', "1,b,5 6 7 8", "0,c,9 10 11 12"]
    (tmp_path / "a.csv").write_text(end.join(["label,note,pixels", *rows]), newline="", encoding="utf-8-sig")
    assert convert("pixels", "a.csv", "a.h5", "--label", "label", "--keep-order").returncode == 0
    with h5py.File(tmp_path / "a.h5") as file:
        assert file["images"][:, 0, 0, 0].tolist() == [1, 5, 9]
        assert file["labels"][:].tolist() == [2, 1, 0]


def test_pixels_that_are_decimals_are_told(tmp_path, convert):
    (tmp_path / "a.csv").write_text("label,pixel0,pixel1,pixel2,pixel3\n1,0.5,0.25,0,1\n")
    result = convert("pixels", "a.csv", "a.h5")
    assert (result.returncode, "pixel0 is '0.5'; it should be a whole number from 0 to 255" in result.stderr) == (
        2,
        True,
    )
