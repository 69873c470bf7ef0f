"""convert.py with encoded images: kept as they are, or made smaller."""

import io
import itertools

import h5py
import numpy as np
import pytest
from harness import read_rows
from PIL import Image

from fastgpu.storage.store import open_store


@pytest.fixture
def photos(tmp_path):
    """40 files of two classes; every tenth is a PNG file."""
    y, x = np.mgrid[:40, :60]
    for number in range(40):
        folder = tmp_path / "photos" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        waves = np.stack([y * 3, x * 2, (x + y + number) % 128], 2).astype(np.uint8)
        Image.fromarray(waves[: 30 + number % 7]).save(folder / f"{number:02d}.{'png' if number % 10 == 0 else 'jpg'}")
    return tmp_path / "photos"


def rows_in(path) -> list[bytes]:
    column = read_rows(open_store("x", str(path), {"images": "images"}))["images"]
    return [column.values[start:stop].tobytes() for start, stop in itertools.pairwise(column.offsets)]


def test_files_become_rows_byte_for_byte(convert, photos, tmp_path):
    files = {path.read_bytes(): path.parent.name for path in photos.glob("*/*")}
    convert("images photos x.h5 --keep-encoded --split 0.8")
    found = {}
    for path in sorted(tmp_path.glob("x-*.h5")):
        with h5py.File(path) as file:
            classes = [name.decode() for name in file.attrs["class_names"]]
            assert set(file["images"].attrs["codec"].decode().split("+")) <= {"jpeg", "png"}
            assert len(file.attrs["mean"]) == 3
            labels = file["labels"][:]
        found |= dict(zip(rows_in(path), [classes[label] for label in labels], strict=True))
        assert convert("check", path).stdout.startswith(f"{path}: whole")
    assert found == files
    assert "images of any size" in convert("info x-train.h5").stdout


def test_the_statistics_are_those_of_the_pixels(convert, photos, tmp_path):
    convert("images photos x.h5 --keep-encoded")
    convert("images photos y.h5 --size 30x60")
    with h5py.File(tmp_path / "x.h5") as x, h5py.File(tmp_path / "y.h5") as y:
        for name in ("mean", "std"):
            np.testing.assert_allclose(x.attrs[name], y.attrs[name], atol=4)


def test_files_are_made_smaller_once(convert, photos, tmp_path):
    convert("images photos x.h5 --keep-encoded --size 20")
    for data in rows_in(tmp_path / "x.h5"):
        image = Image.open(io.BytesIO(data))
        assert image.format == "JPEG"
        assert min(image.size) == 20


def test_a_file_that_cannot_be_decoded_is_named_and_what_decoding_changes_is_told(convert, photos, tmp_path):
    """The files are kept as they are, but training sees 8 bits of 16."""
    for number in range(2):
        Image.fromarray(np.full((30, 60), 40_000, np.uint16)).save(photos / f"a/deep-{number}.png")
    whole = (photos / "b/01.jpg").read_bytes()
    (photos / "b/01.jpg").write_bytes(whole[: len(whole) // 2])
    done = convert("images photos x.h5 --keep-encoded", code=2)
    assert "1 of 42 rows are broken; nothing was written" in done.stderr
    assert "b/01.jpg cannot be read: " in done.stderr
    done = convert("images photos x.h5 --keep-encoded --on-error skip")
    assert len(rows_in(tmp_path / "x.h5")) == 41
    (line,) = [line for line in done.stdout.splitlines() if "changed" in line]
    assert line.startswith("  changed  16 bits to 8 (")
    assert line.endswith("): 2 of 41 images")


def test_encoded_rows_are_repacked_byte_for_byte(convert, photos, tmp_path):
    convert("images photos x.h5 --keep-encoded")
    convert("repack x.h5 y.h5 --seed 3")
    assert sorted(rows_in(tmp_path / "y.h5")) == sorted(rows_in(tmp_path / "x.h5"))
    assert rows_in(tmp_path / "y.h5") != rows_in(tmp_path / "x.h5")
