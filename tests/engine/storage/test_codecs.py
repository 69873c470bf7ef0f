from pathlib import Path

import h5py
import pytest
from harness import numbered, numbers_of
from scattered import read_scattered
from test_layout import CODECS

from fastgpu.process.launch import RankError
from fastgpu.storage import codecs
from fastgpu.storage.store import open_store


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
        filters = codecs.filters_of(file["x"])
        _, raw = file["x"].id.read_direct_chunk((0, 0, 0, 0))
    for damaged in (raw[: len(raw) // 2], bytes(range(256)) * 4, b""):
        with pytest.raises(ValueError, match="cannot be decoded|bytes instead of"):
            codecs.decode(damaged, filters, 0, rows.nbytes)


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ((8, 1, 4, 2), "x: block 2 is damaged: it cannot be decoded .*; restore the file"),
        ((8, 1, 2, 2), r"x.h5: /x from row \d+ on cannot be read \(.*\); restore the file"),  # by the HDF5 library
    ],
)
def test_damage_names_the_block(open_x, chunks, message):
    store = open_x(numbered(40), chunks=chunks, compression="gzip")
    with h5py.File(store.file.path) as file:
        infos = map(file["x"].id.get_chunk_info, range(10))
        damaged = next(info for info in infos if info.chunk_offset[0] == 16)
    with Path(store.file.path).open("r+b") as raw:
        raw.seek(damaged.byte_offset)
        raw.write(bytes(damaged.size))
    store = open_store("data.train", store.file.path, {"x": "x"})
    with pytest.raises(RankError, match=message):
        read_scattered(store)
