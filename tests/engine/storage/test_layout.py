from pathlib import Path

import h5py
import numpy as np
import pytest
from harness import by_h5py, numbered, numbers_of
from scattered import read_scattered

from fastgpu.process.launch import UserError
from fastgpu.storage import layout as module
from fastgpu.storage.filters import decode, filters_of
from fastgpu.storage.store import open_store

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
    monkeypatch.setattr(module, "IOV_MAX", 3)  # fewer rows than a block has
    values = np.random.default_rng(0).integers(0, 3, (50, width)).cumsum(1).astype(dtype)
    store = open_x(values, **(KNOWN | ONLY_H5PY)[layout])
    assert by_h5py(store) == (layout in ONLY_H5PY)
    if layout in KNOWN:
        monkeypatch.setattr(h5py, "File", lambda *_, **__: pytest.fail("read through h5py"))
    rows = read_scattered(store)["x"]
    assert rows.dtype.isnative
    np.testing.assert_array_equal(rows, values)


def test_a_filter_left_out_for_a_chunk_is_not_undone(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        data = file.create_dataset("x", (16, 8), "u1", chunks=(8, 8), compression="gzip", shuffle=True)
        data[:8] = numbered(8).reshape(8, 8)
        data.id.write_direct_chunk((8, 0), numbered(8, start=8).tobytes(), filter_mask=3)  # both left out
    store = open_store("data.train", str(tmp_path / "x.h5"), {"x": "x"})
    assert numbers_of(read_scattered(store)["x"]) == list(range(16))


@pytest.mark.parametrize("name", [name for name in CODECS if name != "lzf, shuffled"])
def test_damaged_chunks_are_an_error(open_x, name):
    rows = numbered(64, (1, 8, 8))
    path = open_x(rows, chunk=64, **CODECS[name]).file.path
    with h5py.File(path) as file:
        filters = filters_of(file["x"])
        _, raw = file["x"].id.read_direct_chunk((0, 0, 0, 0))
    for damaged in (raw[: len(raw) // 2], bytes(range(256)) * 4, b""):
        with pytest.raises(ValueError, match="cannot be decoded|bytes instead of"):
            decode(damaged, filters, 0, rows.nbytes)


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ((8, 1, 4, 2), "x: block 2 is damaged: it cannot be decoded .*; restore the file"),
        ((8, 1, 2, 2), r"x.h5: /x from row \d+ on cannot be read \(.*\); restore the file"),  # by the HDF5 library
    ],
)
def test_damage_names_the_block(open_x, chunks, message):
    path = open_x(numbered(40), chunks=chunks, compression="gzip").file.path
    with h5py.File(path) as file:
        infos = map(file["x"].id.get_chunk_info, range(10))
        damaged = next(info for info in infos if info.chunk_offset[0] == 16)
    with Path(path).open("r+b") as raw:
        raw.seek(damaged.byte_offset)
        raw.write(bytes(damaged.size))
    with pytest.raises(UserError, match=message):
        read_scattered(open_store("data.train", path, {"x": "x"}))
