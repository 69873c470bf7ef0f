import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest
from harness import PLAN, by_h5py, numbered, numbers_of, reads_of

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
def test_chunks_decode_to_what_the_library_gives(tmp_path, name, dtype):
    rows = np.cumsum(np.random.default_rng(0).integers(0, 3, (50, 7))).reshape(50, 7).astype(dtype)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        data = file.create_dataset("x", data=rows, chunks=(8, 7), **OPTIONS[name])
        filters = codecs.filters_of(data.id.get_create_plist())
        assert codecs.can_decode(filters)
        size = 8 * 7 * rows.itemsize
        for start in range(0, 50, 8):
            skipped, raw = data.id.read_direct_chunk((start, 0))
            decoded = np.frombuffer(codecs.decode(raw, filters, skipped, size), dtype).reshape(8, 7)
            np.testing.assert_array_equal(decoded[: 50 - start], data[start : start + 8])


@pytest.mark.parametrize("name", OPTIONS)
def test_a_store_decodes_in_its_own_threads(write, monkeypatch, name):
    store = open_store("data.train", write(50, (1, 96, 96), 8, **OPTIONS[name]), {"images": "images"})
    monkeypatch.setattr(h5py, "File", lambda *_, **__: pytest.fail("read through h5py"))
    assert not by_h5py(store)
    out = {"images": np.zeros((50, 1, 96, 96), np.uint8)}
    for block, rows in enumerate(store.block_rows.tolist()):
        store.read(PLAN, reads_of((8 * block, np.arange(block * 8, block * 8 + rows))), out)
    assert numbers_of(out["images"]) == list(range(50))


def test_a_filter_left_out_for_a_chunk_is_not_undone(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        data = file.create_dataset("x", (16, 8), "u1", chunks=(8, 8), compression="gzip", shuffle=True)
        data[:8] = numbered(8).reshape(8, 8)
        data.id.write_direct_chunk((8, 0), numbered(8, start=8).tobytes(), filter_mask=3)  # both left out
    store = open_store("data.train", str(tmp_path / "x.h5"), {"x": "x"})
    out = {"x": np.zeros((16, 8), np.uint8)}
    for block in (0, 1):
        store.read(PLAN, reads_of((8 * block, np.arange(8) + 8 * block)), out)
    np.testing.assert_array_equal(out["x"], numbered(16).reshape(16, 8))


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "lzf, shuffled"])
@pytest.mark.parametrize("damage", ["cut", "garbage", "empty"])
def test_damaged_chunks_are_an_error(name, damage, tmp_path):
    rows = numbered(64, (1, 8, 8))
    with h5py.File(tmp_path / "x.h5", "w") as file:
        data = file.create_dataset("x", data=rows, chunks=rows.shape, **OPTIONS[name])
        filters = codecs.filters_of(data.id.get_create_plist())
        _, raw = data.id.read_direct_chunk((0, 0, 0, 0))
    bad = {"cut": raw[: len(raw) // 2], "garbage": bytes(range(256)) * 4, "empty": b""}[damage]
    with pytest.raises(ValueError, match="cannot be decoded|bytes instead of"):
        codecs.decode(bad, filters, 0, rows.nbytes)


def test_a_chunk_that_grows_without_end_stops_at_its_size():
    with pytest.raises(ValueError, match="cannot be decoded|bytes instead of"):
        codecs.decode(zlib.compress(bytes(1 << 24))[:1000], [(1, (4,))], 0, 1 << 30)
    with pytest.raises(ValueError, match="goes on behind its end"):
        codecs.decode(zlib.compress(bytes(1 << 24)), [(1, (4,))], 0, 100)


def test_damage_names_the_block(write):
    path = write(40, (1, 96, 96), compression="gzip")
    with h5py.File(path) as file:
        chunk = file["images"].id.get_chunk_info(2)
    with Path(path).open("r+b") as raw:
        raw.seek(chunk.byte_offset)
        raw.write(b"no zlib here")
    store = open_store("data.train", path, {"images": "images"})
    with pytest.raises(RankError, match="images: block 2 is damaged: it cannot be decoded"):
        store.read(PLAN, reads_of((16, np.arange(8))), {"images": np.empty((40, 1, 96, 96), np.uint8)})
