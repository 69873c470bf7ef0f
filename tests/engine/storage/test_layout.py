import h5py
import numpy as np
import pytest
from harness import by_h5py, numbers_of
from scattered import read_scattered

from fastgpu.storage import layout as module
from fastgpu.storage.store import open_store

hdf5plugin = pytest.importorskip("hdf5plugin", reason="comes with the codecs")

BIG = (1, 96, 96)  # 9 KiB: rows that the kernel scatters


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
        {"chunk": 8, "compression": hdf5plugin.Bitshuffle()},
    ],
)
def test_every_layout_gives_the_rows_without_the_hdf5_library_if_that_can_be(store, monkeypatch, shape, options):
    opened = store(100, shape, **options)
    is_known = "fletcher32" not in options and not isinstance(options.get("compression"), hdf5plugin.Bitshuffle)
    assert by_h5py(opened) == (not is_known)
    if is_known:
        monkeypatch.setattr(h5py, "File", lambda *_, **__: pytest.fail("read through h5py"))
    rows = read_scattered(opened)
    assert numbers_of(rows["images"]) == list(range(100))
    assert rows["labels"].tolist() == [n % 4 for n in range(100)]


@pytest.mark.usefixtures("either_cached_or_not")
@pytest.mark.parametrize("chunks", [(3, 2), (3, 3000)], ids=["split rows", "whole rows"])
def test_rows_in_foreign_byte_order(tmp_path, chunks):
    wide = np.arange(20 * 3000, dtype=">i4").reshape(20, 3000)[:, : 3 * chunks[1]]
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("images", data=wide, chunks=chunks)
        file["labels"] = np.arange(20.0, dtype=">f8")
    store = open_store("data.train", str(tmp_path / "x.h5"), {"images": "images", "labels": "labels"})
    assert by_h5py(store) == (chunks == (3, 2))
    rows = read_scattered(store)
    assert rows["images"].dtype.isnative
    np.testing.assert_array_equal(rows["images"], wide)
    np.testing.assert_array_equal(rows["labels"], np.arange(20.0))


@pytest.mark.usefixtures("nothing_cached")
def test_more_rows_in_a_block_than_one_system_call_takes(store, monkeypatch):
    monkeypatch.setattr(module, "IOV_MAX", 3)
    assert numbers_of(read_scattered(store(40, BIG, 10))["images"]) == list(range(40))
