import h5py
import numpy as np
import pytest
from harness import numbered, numbers_of
from scattered import read_scattered

from fastgpu.process.launch import RankError
from fastgpu.storage import codecs
from fastgpu.storage.store import open_store

hdf5plugin = pytest.importorskip("hdf5plugin", reason="comes with the codecs")

OPTIONS = {
    "gzip": {"compression": "gzip"},
    "gzip, shuffled": {"compression": "gzip", "shuffle": True},
    "lzf": {"compression": "lzf"},
    "lzf, shuffled": {"compression": "lzf", "shuffle": True},
    "blosc": {"compression": hdf5plugin.Blosc(cname="lz4", shuffle=2)},
    "lz4": {"compression": hdf5plugin.LZ4()},
    "zstd": {"compression": hdf5plugin.Zstd()},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", ["u1", "<i4", ">f8"])
def test_chunks_are_decoded_without_the_hdf5_library(tmp_path, monkeypatch, name, dtype):
    values = np.cumsum(np.random.default_rng(0).integers(0, 3, (50, 7))).reshape(50, 7).astype(dtype)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=values, chunks=(8, 7), **OPTIONS[name])
    store = open_store("data.train", str(tmp_path / "x.h5"), {"x": "x"})
    monkeypatch.setattr(h5py, "File", lambda *_, **__: pytest.fail("read through h5py"))
    np.testing.assert_array_equal(read_scattered(store)["x"], values)


def test_a_filter_left_out_for_a_chunk_is_not_undone(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        data = file.create_dataset("x", (16, 8), "u1", chunks=(8, 8), compression="gzip", shuffle=True)
        data[:8] = numbered(8).reshape(8, 8)
        data.id.write_direct_chunk((8, 0), numbered(8, start=8).tobytes(), filter_mask=3)  # both left out
    store = open_store("data.train", str(tmp_path / "x.h5"), {"x": "x"})
    assert numbers_of(read_scattered(store)["x"]) == list(range(16))


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "lzf, shuffled"])
@pytest.mark.parametrize("damage", ["cut", "garbage", "empty"])
def test_damaged_chunks_are_an_error(name, damage, tmp_path):
    rows = numbered(64, (1, 8, 8))
    with h5py.File(tmp_path / "x.h5", "w") as file:
        data = file.create_dataset("x", data=rows, chunks=rows.shape, **OPTIONS[name])
        filters = codecs.filters_of(data)
        _, raw = data.id.read_direct_chunk((0, 0, 0, 0))
    bad = {"cut": raw[: len(raw) // 2], "garbage": bytes(range(256)) * 4, "empty": b""}[damage]
    with pytest.raises(ValueError, match="cannot be decoded|bytes instead of"):
        codecs.decode(bad, filters, 0, rows.nbytes)


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        ((8, 1, 4, 2), "x: block 2 is damaged: it cannot be decoded .*; restore the file"),
        ((8, 1, 2, 2), r"x.h5: /x from row \d+ on cannot be read \(.*\); restore the file"),  # by the HDF5 library
    ],
)
def test_damage_names_the_block(tmp_path, chunk, message):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        data = file.create_dataset("x", data=numbered(40), chunks=chunk, compression="gzip")
        bytes_of_chunk = next(info for info in map(data.id.get_chunk_info, range(10)) if info.chunk_offset[0] == 16)
    with path.open("r+b") as raw:
        raw.seek(bytes_of_chunk.byte_offset)
        raw.write(bytes(bytes_of_chunk.size))
    store = open_store("data.train", str(path), {"x": "x"})
    with pytest.raises(RankError, match=message):
        read_scattered(store)
