"""Rows made up, of any shape and number: to try a configuration or a machine before the data is there."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from fastgpu.rows.contract import BlockRead, Source
from fastgpu.rows.field import Field

BLOCK_ROWS = 64
NOISE = 64  # standard deviation of a pixel; the pictures of the classes are 0..255


class SyntheticImages(Source):
    """Noisy pictures, one smooth picture a class; a function of (seed, row) that takes no memory.

    shape: (C, H, W). part: 0 to train, 1 to validate: other noise on the same pictures, which are plain enough for
    a small network to learn, and the noise too strong for one pixel.
    """

    def __init__(self, rows: int, shape: tuple[int, int, int], classes: int, seed: int, part: int = 0):
        self.name = f"synthetic images, seed {seed}"
        self._rows, self._shape, self._classes, self._stream = rows, shape, classes, (seed, 1 + part)
        self.fields = {"images": Field(np.dtype(np.uint8), shape), "labels": Field(np.dtype(np.int64), ())}
        self.attributes: dict[str, Any] = {"class_names": [str(number) for number in range(classes)]}
        self.block_rows = np.diff(np.arange(0, rows, BLOCK_ROWS), append=rows).astype(np.int32)
        rng = np.random.default_rng(seed)
        coarse = rng.random((classes, shape[0], 4, 4), np.float32)
        height, width = np.arange(shape[1]) * 4 // shape[1], np.arange(shape[2]) * 4 // shape[2]
        self._pictures = 255 * coarse[:, :, height[:, None], width]

    def __len__(self) -> int:
        return self._rows

    def column(self, name: str) -> np.ndarray:
        """The labels of all rows; raises KeyError for the images."""
        return {"labels": np.arange(self._rows) % self._classes}[name]

    def read(self, reads: Iterable[BlockRead], out: Mapping[str, np.ndarray]) -> None:
        """Rows first, first + 1, ... of each block -> out[field][places]. Thread-safe."""
        for block, first, places in reads:
            rng = np.random.default_rng((*self._stream, block))
            noise = rng.standard_normal((first + len(places), *self._shape), np.float32)[first:]
            labels = (block * BLOCK_ROWS + first + np.arange(len(places))) % self._classes
            pixels = self._pictures[labels] + NOISE * noise
            out["images"][places] = np.clip(pixels, 0, 255).astype(np.uint8)
            out["labels"][places] = labels


# ---------------------------------------------------------------------------------------------- interactions
