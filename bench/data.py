"""The benchmark's data: files of CelebA's and CIFAR's shape, whose rows can be told apart.

The first four bytes of image n hold n, and so does its label: whatever a loader delivers can be checked. The rest is
noise that repeats from block to block; nothing here is compressed, so the content does not change the speed.
"""

import math
import os
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np

FOLDER = Path(__file__).parent / "data"
CHUNK_BYTES = 2 << 20


class Rows(NamedTuple):
    """A data set, and the batch that it is read in."""

    name: str
    rows: int
    shape: tuple[int, int, int]
    batch_rows: int

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape)

    @property
    def h5(self) -> Path:
        return self.folder / "rows.h5"

    @property
    def folder(self) -> Path:
        """Where the peers keep their own formats of it."""
        return FOLDER / f"{self.name}-{self.rows}"


FULL = (Rows("celeba", 12_000, (3, 218, 178), 256), Rows("cifar", 200_000, (3, 32, 32), 1024))
QUICK = (Rows("celeba", 1_024, (3, 218, 178), 64), Rows("cifar", 8_192, (3, 32, 32), 256))


def make(data: Rows) -> None:
    """Write the file unless it is there: one that has its name is whole."""
    if data.h5.exists():
        return
    data.folder.mkdir(parents=True, exist_ok=True)
    partial = data.h5.with_name(f"rows.{os.getpid()}.partial")
    try:
        _write(partial, data)
        partial.rename(data.h5)
    finally:
        partial.unlink(missing_ok=True)


def _write(path: Path, data: Rows) -> None:
    chunk_rows = max(1, CHUNK_BYTES // data.row_bytes)
    block = np.random.default_rng(0).integers(0, 256, (chunk_rows, *data.shape), np.uint8)
    first_bytes = block.reshape(chunk_rows, -1)[:, :4]
    with h5py.File(path, "w", libver="latest", alignment_threshold=65536, alignment_interval=4096) as file:
        images = file.create_dataset(
            "images", (data.rows, *data.shape), np.uint8, chunks=(chunk_rows, *data.shape), fill_time="never"
        )
        for start in range(0, data.rows, chunk_rows):
            numbers = np.arange(start, min(start + chunk_rows, data.rows))
            first_bytes[: len(numbers)] = numbers.astype("<u4").view(np.uint8).reshape(-1, 4)
            images[start : start + len(numbers)] = block[: len(numbers)]
        file["labels"] = np.arange(data.rows, dtype=np.int64)
