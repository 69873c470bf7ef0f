import h5py
import numpy as np
import pytest
from harness import by_h5py, numbers_of
from scattered import read_scattered

from fastgpu.storage import layout as module

hdf5plugin = pytest.importorskip("hdf5plugin", reason="comes with the codecs")

CODECS = {
    "gzip": {"compression": "gzip"},
    "gzip, shuffled": {"compression": "gzip", "shuffle": True},
    "lzf": {"compression": "lzf"},
    "lzf, shuffled": {"compression": "lzf", "shuffle": True},
    "blosc": {"compression": hdf5plugin.Blosc(cname="lz4", shuffle=2)},
    "lz4": {"compression": hdf5plugin.LZ4()},
    "zstd": {"compression": hdf5plugin.Zstd()},
}
KNOWN = {"one row": {"chunk": 1}, "eight rows": {}, "one chunk": {"chunk": 50}, "no chunks": {"chunk": None}} | CODECS
ONLY_H5PY = {
    "split rows": {"chunks": (50, 6)},
    "checksums": {"fletcher32": True},
    "bitshuffle": {"compression": hdf5plugin.Bitshuffle()},
}


@pytest.mark.usefixtures("either_cached_or_not")
@pytest.mark.parametrize("width", [7, 9216])  # the kernel scatters the longer rows
@pytest.mark.parametrize("dtype", ["u1", "<i4", ">f8"])
@pytest.mark.parametrize("layout", KNOWN | ONLY_H5PY)
def test_every_layout_gives_the_rows_without_the_hdf5_library_if_that_can_be(open_x, monkeypatch, width, dtype, layout):
    values = np.random.default_rng(0).integers(0, 3, (50, width)).cumsum(1).astype(dtype)
    store = open_x(values, **(KNOWN | ONLY_H5PY)[layout])
    assert by_h5py(store) == (layout in ONLY_H5PY)
    if layout in KNOWN:
        monkeypatch.setattr(h5py, "File", lambda *_, **__: pytest.fail("read through h5py"))
    rows = read_scattered(store)["x"]
    assert rows.dtype.isnative
    np.testing.assert_array_equal(rows, values)


@pytest.mark.usefixtures("nothing_cached")
def test_more_rows_in_a_block_than_one_system_call_takes(store, monkeypatch):
    monkeypatch.setattr(module, "IOV_MAX", 3)
    assert numbers_of(read_scattered(store(40, (1, 96, 96), 10))["images"]) == list(range(40))
