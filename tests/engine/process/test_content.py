"""What a file is said to be, by its first bytes."""

import gzip
import json
import os
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from PIL import Image

from fastgpu.process.content import TEXT, describe_content
from fastgpu.process.launch import UserError
from fastgpu.storage.hdf5 import open_file

ROWS = [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]


def save_zip(path: Path, member: str) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, "x")


def save_tar(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        archive.add(__file__, "x.py")


KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "npz": (lambda path: np.savez(path.open("wb"), x=np.zeros(3)), "NumPy arrays: `python convert.py arrays"),
    "npy": (lambda path: np.save(path.open("wb"), np.zeros(3)), "a NumPy array: `python convert.py arrays"),
    "torch": (lambda path: torch.save(torch.zeros(3), path), "a file of torch.save: "),
    "excel": (lambda path: save_zip(path, "[Content_Types].xml"), "an Excel file: save it as CSV"),
    "zip": (lambda path: save_zip(path, "a.png"), "a packed file or an archive: unpack it"),
    "tar": (save_tar, "a packed file or an archive: unpack it"),
    "gzip": (lambda path: path.write_bytes(gzip.compress(b"a,b\n")), "a packed file or an archive: unpack it"),
    "matlab": (lambda path: path.write_bytes(b"MATLAB 5.0 MAT-file".ljust(200)), "a MATLAB 5 file: "),
    "pickle": (lambda path: path.write_bytes(pickle.dumps([1, 2])), "a pickle, which can run programs"),
    "parquet": (
        lambda path: path.write_bytes(b"PAR1\x15\x04"),
        "a Parquet file: `python convert.py arrays` or `images`",
    ),
    "lfs": (lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n"), "a pointer of Git LFS"),
    "image": (lambda path: Image.new("L", (3, 3)).save(path, "PNG"), "an image: "),
    "json": (lambda path: path.write_text(json.dumps(ROWS, indent=1)), "JSON: "),
    "json of columns": (lambda path: path.write_text('{"a": [1, 2]}'), "JSON: "),
    "lines of json": (lambda path: path.write_text("\n".join(map(json.dumps, ROWS))), "JSON: "),
    "xml": (lambda path: path.write_text('\n<?xml version="1.0"?><a/>'), "XML or HTML, such as the page of a login"),
    "empty": (lambda path: path.touch(), "empty"),
    "csv": (lambda path: path.write_text("größe,x\n1,2\n", encoding="cp1252"), TEXT.partition(";")[0]),
    "bytes": (lambda path: path.write_bytes(bytes(range(256))), ""),
    "fifo": (os.mkfifo, ""),
    "absent": (lambda path: None, ""),
    "a folder": (lambda path: path.mkdir(), ""),
}


@pytest.mark.parametrize("kind", KINDS)
def test_content_is_told_from_the_first_bytes(tmp_path, kind):
    make, expected = KINDS[kind]
    make(tmp_path / "x")
    found = describe_content(tmp_path / "x")
    assert found.startswith(expected)
    assert bool(found) == bool(expected)
    if found:
        with (
            pytest.raises(UserError, match=r"^data.train: \S+ is no HDF5 file, but ") as raised,
            open_file(str(tmp_path / "x"), f"data.train: {tmp_path / 'x'}"),
        ):
            pass
        assert str(raised.value).endswith(found)


def test_content_of_hdf5_and_odd_names(tmp_path):
    with h5py.File(tmp_path / "x", "w") as file:
        file["x"] = 1
    assert describe_content(tmp_path / "x").startswith("an HDF5 file")
    assert not describe_content("x\0y")
    assert not describe_content("x" * 5000)


def test_content_before_an_hdf5_file_is_no_other_kind(tmp_path):
    """HDF5 may begin behind a block of any text; then another mistake is told as what it is."""
    with h5py.File(tmp_path / "x", "w", userblock_size=512) as file:
        file["x"] = 1
    with (tmp_path / "x").open("r+b") as raw:
        raw.write(b"notes".ljust(512))
    path = str(tmp_path / "x")
    with pytest.raises(UserError, match="cannot be read as HDF5: .* doesn't exist"), open_file(path, path) as (_, file):
        file["y"]
