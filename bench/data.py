"""The data of the benchmark: files in the shape of CelebA and of CIFAR, whose rows can be told apart.

The first four bytes of image n hold n, and so does its label: the rows that a loader delivers can be checked. The other
bytes are noise that repeats from block to block. Nothing is compressed, so the content has no influence on the speed.
"""

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import project  # noqa: F401

from fastgpu.convert.writer import Writer
from fastgpu.convert.writing import complete_or_absent
from fastgpu.rows.rows import Field

FOLDER = Path(__file__).parent / "data"


class DataSpec(NamedTuple):
    """A data set, and the batch size that it is read in."""

    name: str
    n_rows: int
    shape: tuple[int, int, int]
    """(C, H, W) of an image."""
    batch_size: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one image."""
        return math.prod(self.shape)

    @property
    def folder(self) -> Path:
        """The folder of the HDF5 file, in which the peers keep their own formats of the data, too."""
        return FOLDER / f"{self.name}-{self.n_rows}"

    @property
    def h5(self) -> Path:
        return self.folder / "rows.h5"


FULL = (DataSpec("celeba", 12_000, (3, 218, 178), 256), DataSpec("cifar", 200_000, (3, 32, 32), 1024))
QUICK = (DataSpec("celeba", 1_024, (3, 218, 178), 64), DataSpec("cifar", 8_192, (3, 32, 32), 256))


def make(data: DataSpec) -> None:
    """Write the file as convert.py would. A file that exists is kept, since a writer leaves whole files only."""
    if data.h5.exists():
        return
    data.folder.mkdir(parents=True, exist_ok=True)
    fields = {"images": Field(np.dtype(np.uint8), data.shape), "labels": Field(np.dtype(np.int64), ())}
    noise = np.random.default_rng(0).integers(0, 256, (min(data.n_rows, 1000), *data.shape), np.uint8)
    attributes = {"source": "bench/data.py"}
    with (
        complete_or_absent(data.h5) as folder,
        Writer(folder / data.h5.name, data.n_rows, fields, attributes) as writer,
    ):
        for start in range(0, data.n_rows, len(noise)):
            labels = np.arange(start, min(start + len(noise), data.n_rows))
            images = noise[: len(labels)]
            images.reshape(len(images), -1)[:, :4] = labels.astype("<u4").view(np.uint8).reshape(-1, 4)
            writer.append({"images": images, "labels": labels})
