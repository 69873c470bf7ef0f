"""How many of our functions lie between the dataset and the bytes of a row."""

import io
import sys
import traceback
from pathlib import Path

import h5py
import numpy as np
import pytest
from harness import PLAN, reads_of
from PIL import Image

from fastgpu.images.column import decoded
from fastgpu.rows.contract import Dataset
from fastgpu.storage import file as file_room
from fastgpu.storage.store import open_store

FIELDS = {"images": "images", "labels": "labels"}


def frames_of(source: Dataset, monkeypatch) -> list[str]:
    """The functions on the stack from `read` of the dataset to the system call, outermost first."""
    stacks: list[list[str]] = []
    real = file_room.os.preadv

    def note(*arguments):
        own = [
            frame.name for frame in traceback.extract_stack(sys._getframe(1)) if "fastgpu" in Path(frame.filename).parts
        ]
        stacks.append(own)
        return real(*arguments)

    monkeypatch.setattr(file_room.OpenFile, "cached", lambda *_: None)  # as if nothing were in the page cache
    monkeypatch.setattr(file_room.os, "preadv", note)
    out = {name: np.zeros((4, *field.shape), field.dtype) for name, field in source.fields.items()}
    source.read(PLAN, reads_of((0, np.arange(4))), out)
    return max(stacks, key=len)


@pytest.mark.parametrize("options", [{}, {"compression": "gzip"}])
@pytest.mark.parametrize("shape", [(1, 4, 2), (1, 96, 96)])
def test_the_way_of_a_row_has_at_most_five_functions(write, monkeypatch, options, shape):
    frames = frames_of(open_store("data.train", write(40, shape, chunk=8, **options), FIELDS), monkeypatch)
    assert frames[0] == "read"
    assert len(frames) <= 5, frames


def test_the_way_of_an_encoded_image_has_as_many(tmp_path, monkeypatch):
    file = io.BytesIO()
    Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(file, "JPEG")
    data = np.frombuffer(file.getvalue(), np.uint8)
    with h5py.File(tmp_path / "x.h5", "w") as target:
        target["images/indptr"] = np.arange(5) * len(data)
        target["images/values"] = np.tile(data, 4)
        target["images"].attrs["codec"] = "jpeg"
    store = open_store("data.train", str(tmp_path / "x.h5"), {"images": "images"})
    frames = frames_of(decoded(store, (16, 16)), monkeypatch)
    assert len(frames) <= 5, frames
