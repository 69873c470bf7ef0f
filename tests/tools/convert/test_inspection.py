from pathlib import Path

import h5py
import numpy as np
import pytest

from fastgpu.convert.summary import advise, columns_of, damaged, fields_of
from fastgpu.process.launch import UserError
from fastgpu.storage.store import open_store


def test_datasets_are_described_at_any_depth(write):
    path = write(100, chunk=8, compression="gzip", shuffle=True)
    with h5py.File(path, "a") as file:
        file["deep/words"] = np.arange(3)
        file["text"] = ["a", "b"]
        file["scalar"] = 3
        file["empty"] = np.zeros(0)
    by_path = {column.path: column for column in columns_of(path)}
    assert set(by_path) == {"/images", "/labels", "/deep/words"}
    images = by_path["/images"]
    assert (images.shape, images.chunk, images.filters) == ((100, 1, 4, 2), (8, 1, 4, 2), ("shuffle", "gzip"))
    assert (images.nbytes, images.block_bytes) == (800, 64)
    assert "13 blocks (8, 1, 4, 2) of 0.00 MiB, shuffle + gzip, no checksums" in str(images)
    assert "in one piece, plain" in str(by_path["/labels"])
    assert [column.path for column in columns_of(f"{path}::/deep")] == ["/deep/words"]


def test_the_fields_of_a_file_can_be_opened(write_ragged):
    path = write_ragged(30)
    with h5py.File(path, "a") as file:
        file["items/data"] = file["items/indices"][:] / 8
    fields = fields_of(columns_of(path))
    assert fields == {"/": {"items": "items", "items_values": "items/data", "number": "number"}}
    assert len(open_store("data.train", path, fields["/"])) == 30


def test_files_that_cannot_be_inspected(write, tmp_path):
    with pytest.raises(UserError, match="none.h5 does not exist"):
        columns_of(str(tmp_path / "none.h5"))
    with pytest.raises(UserError, match="rows.h5 has no group /train; it has images, labels"):
        columns_of(f"{write(4)}::/train")


@pytest.mark.parametrize(
    ("shape", "options", "advice"),
    [
        ((40, 8, 8), {"chunks": (8, 4, 8)}, "chunks split rows"),
        (
            (40, 8, 8),
            {"chunks": (8, 8, 8), "compression": "gzip"},
            "gzip: decoded anew in each epoch, 21 to 23x slower",
        ),
        ((40, 1, 8, 8), {"dtype": "f4"}, "images as float32: uint8 is 4x fewer bytes"),
        ((40, 8), {}, "no checksums: damage would go unnoticed"),
        ((40, 1 << 20), {"dtype": "u1", "chunks": (1, 1 << 20)}, "no checksums"),
        ((600_000, 64), {"dtype": "u1", "chunks": (100, 64)}, "chunks of 100 rows, 6.2 KiB: each takes a call"),
        ((40, 1 << 20), {"dtype": "u1", "chunks": (40, 1 << 20)}, "blocks of 40 MiB: few fit a pool"),
    ],
)
def test_advice_on_what_makes_a_file_slow(tmp_path, shape, options, advice):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", shape, **({"dtype": "u1"} | options))
    lines = advise(columns_of(str(tmp_path / "x.h5")))
    assert any(line.startswith(f"/x: {advice}") for line in lines), lines


def test_damaged_blocks_are_listed(write):
    path = write(40, (1, 96, 96), compression="gzip")
    with h5py.File(path) as file:
        chunk = file["images"].id.get_chunk_info(2)
    sizes = []
    assert damaged(path, 2, sizes.append) == []
    assert sum(sizes) == 40 * 96 * 96 + 40 * 8
    with Path(path).open("r+b") as raw:
        raw.seek(chunk.byte_offset)
        raw.write(b"no zlib here")
    (line,) = damaged(path, 2, sizes.append)
    assert line.startswith(f"rows 16 to 23: {path}: /images: block 2 is damaged: it cannot be decoded")
