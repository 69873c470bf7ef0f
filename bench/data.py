"""The benchmark's data: files of CelebA's and CIFAR's shape, whose rows can be told apart.

The first four bytes of image n hold n, and so does its label: whatever a loader delivers can be checked. The rest is
noise that repeats from block to block; nothing here is compressed, so the content does not change the speed.
"""

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import project  # noqa: F401
from fastgpu.convert.writer import Writer
from fastgpu.rows.field import Field

FOLDER = Path(__file__).parent / "data"


class Rows(NamedTuple):
    """A data set, and the batch that it is read in."""

    name: str
    rows: int
    shape: tuple[int, int, int]
    batch_size: int

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
    """Write the file, as convert.py would, unless it is there: one that has its name is whole."""
    if data.h5.exists():
        return
    data.folder.mkdir(parents=True, exist_ok=True)
    fields = {"images": Field(np.dtype(np.uint8), data.shape), "labels": Field(np.dtype(np.int64), ())}
    block = np.random.default_rng(0).integers(0, 256, (min(data.rows, 1000), *data.shape), np.uint8)
    with Writer(data.h5, data.rows, fields, {"source": "bench/data.py"}) as writer:
        for start in range(0, data.rows, len(block)):
            labels = np.arange(start, min(start + len(block), data.rows))
            images = block[: len(labels)]
            images.reshape(len(images), -1)[:, :4] = labels.astype("<u4").view(np.uint8).reshape(-1, 4)
            writer.append({"images": images, "labels": labels})
