import hashlib
from pathlib import Path

import h5py
import numpy as np
import pytest
from harness import by_h5py, numbers_of
from scattered import read_scattered

from fastgpu.process.launch import UserError
from fastgpu.storage import layout as layout_module
from fastgpu.storage.file import OpenFile
from fastgpu.storage.layout import DIGESTS, Layout
from fastgpu.storage.store import open_store

hdf5plugin = pytest.importorskip("hdf5plugin", reason="comes with the codecs")

FIELDS = {"images": "images", "labels": "labels"}
BIG = (1, 96, 96)  # 9 KiB: rows that the kernel scatters


def refused(path: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_store("data.train", path, FIELDS)


@pytest.mark.usefixtures("either_cached_or_not")
@pytest.mark.parametrize("shape", [(1, 4, 2), BIG])
@pytest.mark.parametrize(
    "options",
    [
        {"chunk": 8},
        {"chunk": 1},
        {"chunk": 100},
        {"chunk": None},
        {"chunk": 8, "compression": "gzip"},
        {"chunk": 8, "compression": "lzf", "shuffle": True},
        {"chunk": 8, "fletcher32": True},
    ],
)
def test_every_layout_gives_the_rows_without_the_hdf5_library_if_that_can_be(write, monkeypatch, shape, options):
    store = open_store("data.train", write(100, shape, **options), FIELDS)
    assert by_h5py(store) == ("fletcher32" in options)
    if not by_h5py(store):
        monkeypatch.setattr(h5py, "File", lambda *_, **__: pytest.fail("read through h5py"))
    rows = read_scattered(store)
    assert numbers_of(rows["images"]) == list(range(100))
    assert rows["labels"].tolist() == [n % 4 for n in range(100)]


@pytest.mark.usefixtures("either_cached_or_not")
@pytest.mark.parametrize("chunks", [(3, 2), (3, 3000)], ids=["split rows", "whole rows"])
def test_rows_in_foreign_byte_order(tmp_path, chunks):
    wide = np.arange(20 * 3000, dtype=">i4").reshape(20, 3000)[:, : 6 if chunks == (3, 2) else 3000]
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("images", data=wide, chunks=chunks)
        file["labels"] = np.arange(20.0, dtype=">f8")
    store = open_store("data.train", str(tmp_path / "x.h5"), FIELDS)
    assert by_h5py(store) == (chunks == (3, 2))
    rows = read_scattered(store)
    assert rows["images"].dtype.isnative
    np.testing.assert_array_equal(rows["images"], wide)
    np.testing.assert_array_equal(rows["labels"], np.arange(20.0))


@pytest.mark.usefixtures("nothing_cached")
def test_more_rows_in_a_block_than_one_system_call_takes(write, monkeypatch):
    monkeypatch.setattr(layout_module, "IOV_MAX", 3)
    store = open_store("data.train", write(40, BIG, 10), FIELDS)
    assert numbers_of(read_scattered(store)["images"]) == list(range(40))


def test_a_dataset_is_read_as_a_whole_in_the_type_that_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(layout_module, "BLOCK_BYTES", 64)  # more than one step
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=np.arange(100, dtype="u2"), chunks=(7,))
    with h5py.File(tmp_path / "x.h5") as file:
        layout = Layout("x", file["x"], OpenFile(file.filename))
    rows = layout.read_all(np.dtype("i8"))
    assert rows.dtype == np.int64
    assert rows.tolist() == list(range(100))


# ---------------------------------------------------------------------------------------------- refused files


def test_a_truncated_file(write):
    path = write(100, BIG)
    with Path(path).open("r+b") as raw:
        raw.truncate(20_000)
    refused(path, "truncated.*: copy or write it again")


def test_a_filter_that_nothing_here_can_undo(write, monkeypatch):
    path = write(40, compression=hdf5plugin.Bitshuffle())
    store = open_store("data.train", path, FIELDS)
    assert by_h5py(store)
    assert numbers_of(read_scattered(store)["images"]) == list(range(40))
    monkeypatch.setattr(h5py.h5z, "filter_avail", lambda code: False)
    refused(path, "compressed by bitshuffle: pip install hdf5plugin")


# ---------------------------------------------------------------------------------------------- checksums


def write_digests(path: str, chunk_rows: int) -> None:
    with h5py.File(path, "r+") as file:
        n_rows = len(file["images"])
        for name, step in (("images", chunk_rows), ("labels", n_rows)):
            blocks = [file[name][start : start + step] for start in range(0, n_rows, step)]
            digests = [list(hashlib.sha256(block.tobytes()).digest()) for block in blocks]
            file[f"{DIGESTS}/{name}"] = np.array(digests, np.uint8)


def test_checksums_tell_rows_apart_that_are_not_read(write):
    path = write(40, (1, 4, 2), 7)
    write_digests(path, 7)
    digest = open_store("data.train", path, FIELDS).digest
    assert open_store("data.train", path, FIELDS).digest == digest
    with h5py.File(path, "r+") as file:
        file[f"{DIGESTS}/images"][5, 0] ^= 1
    assert open_store("data.train", path, FIELDS).digest != digest
