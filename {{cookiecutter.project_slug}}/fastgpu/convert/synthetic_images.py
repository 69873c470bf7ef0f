"""Made-up images of any shape and number, to try a configuration or a machine before the data is there."""

from collections.abc import Iterable, Mapping

import numpy as np

from fastgpu.rows.contract import BlockRead, Source
from fastgpu.rows.field import Field

BLOCK_ROWS = 64
GRID = 4
"""The picture of a class is a grid of so many squares in each direction."""
NOISE = 64
"""Standard deviation of a pixel. The pictures of the classes have values from 0 to 255."""


class SyntheticImages(Source):
    """Noise on pictures, one smooth picture for each class. A function of (seed, row) that takes no memory.

    A small network can learn the pictures, but the noise is too strong for a single pixel to tell the class. shape:
    (C, H, W). part: 0 for training, 1 for validation, which has other noise on the same pictures.
    """

    def __init__(self, n_rows: int, shape: tuple[int, int, int], n_classes: int, *, seed: int, part: int = 0):
        channels, height, width = shape
        self.name = f"synthetic images, seed {seed}"
        self.fields = {"images": Field(np.dtype(np.uint8), shape), "labels": Field(np.dtype(np.int64), ())}
        self.attributes = {"class_names": [str(number) for number in range(n_classes)]}
        self.block_rows = np.diff(np.arange(0, n_rows, BLOCK_ROWS), append=n_rows).astype(np.int32)
        self._n_rows = n_rows
        self._shape = shape
        self._n_classes = n_classes
        self._stream = (seed, 1 + part)
        coarse = np.random.default_rng(seed).random((n_classes, channels, GRID, GRID), np.float32)
        rows = np.arange(height) * GRID // height
        columns = np.arange(width) * GRID // width
        self._pictures = 255 * coarse[:, :, rows[:, None], columns]

    def __len__(self) -> int:
        return self._n_rows

    def column(self, name: str) -> np.ndarray:
        """The labels of all rows. Raises KeyError for the images."""
        return {"labels": np.arange(self._n_rows) % self._n_classes}[name]

    def read(self, reads: Iterable[BlockRead], out: Mapping[str, np.ndarray]) -> None:
        """Make rows first, first + 1, ... of each block at their places. Thread-safe."""
        for block, first, places in reads:
            rng = np.random.default_rng((*self._stream, block))
            noise = rng.standard_normal((first + len(places), *self._shape), np.float32)[first:]
            labels = (block * BLOCK_ROWS + first + np.arange(len(places))) % self._n_classes
            pixels = self._pictures[labels] + NOISE * noise
            out["images"][places] = np.clip(pixels, 0, 255).astype(np.uint8)
            out["labels"][places] = labels
