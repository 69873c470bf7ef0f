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


def test_files_become_rows_byte_for_byte_also_when_they_are_repacked(convert, photos, tmp_path):
    files = {path.read_bytes(): path.parent.name for path in photos.glob("*/*")}
    convert("images photos x.h5 --keep-encoded --split 0.8")
    convert("images photos pixels.h5 --size 30x60")
    found = {}
    for part in ("train", "val"):
        convert(f"repack x-{part}.h5 y-{part}.h5 --seed 3")
        paths = [tmp_path / f"{name}-{part}.h5" for name in "xy"]
        with h5py.File(paths[0]) as file, h5py.File("pixels.h5") as pixels:
            classes = [name.decode() for name in file.attrs["class_names"]]
            assert set(file["images"].attrs["codec"].decode().split("+")) <= {"jpeg", "png"}
            for name in ("mean", "std"):
                np.testing.assert_allclose(file.attrs[name], pixels.attrs[name], atol=8)
            labels = file["labels"][:]
        rows, again = map(rows_in, paths)
        assert rows != again
        assert sorted(rows) == sorted(again)
        found |= dict(zip(rows, [classes[label] for label in labels], strict=True))
        assert convert("check", paths[0]).stdout.startswith(f"{paths[0]}: whole")
    assert found == files
    assert "images of any size" in convert("info x-train.h5").stdout


def test_files_are_made_smaller_once(convert, photos, tmp_path):
    convert("images photos x.h5 --keep-encoded --size 20")
    images = [Image.open(io.BytesIO(data)) for data in rows_in(tmp_path / "x.h5")]
    assert {(image.format, min(image.size)) for image in images} == {("JPEG", 20)}


def test_a_file_that_cannot_be_decoded_is_named_and_what_decoding_changes_is_told(convert, photos, tmp_path):
    """The files are kept as they are, but training sees 8 bits of 16."""
    for number in range(2):
        Image.fromarray(np.full((30, 60), 40_000, np.uint16)).save(photos / f"a/deep-{number}.png")
    whole = (photos / "b/01.jpg").read_bytes()
    (photos / "b/01.jpg").write_bytes(whole[: len(whole) * 9 // 10])
    done = convert("images photos x.h5 --keep-encoded", code=2)
    assert "1 of 42 rows are broken; nothing was written" in done.stderr
    assert "b/01.jpg cannot be read: " in done.stderr
    done = convert("images photos x.h5 --keep-encoded --on-error skip")
    assert len(rows_in(tmp_path / "x.h5")) == 41
    (line,) = [line for line in done.stdout.splitlines() if "changed" in line]
    assert line.startswith("  changed  16 bits to 8 (")
    assert line.endswith("): 2 of 41 images")
