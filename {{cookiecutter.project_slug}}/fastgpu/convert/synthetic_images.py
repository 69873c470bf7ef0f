"""Made-up images of any shape and number, to try a configuration or a machine before the data is there."""

import numpy as np

from fastgpu.convert.array_files import Columns, LazyColumn
from fastgpu.storage.arrays import Arrays

BLOCK_ROWS = 64
GRID = 4
"""The picture of a class is a grid of so many squares in each direction."""
NOISE = 64
"""Standard deviation of a pixel. The pictures of the classes have values from 0 to 255."""


def make_images(n_rows: int, shape: tuple[int, int, int], n_classes: int, *, seed: int, part: int = 0) -> Arrays:
    """Noise on pictures, one smooth picture for each class: a function of (seed, row), made when it is read.

    A small network can learn the pictures, but the noise is too strong for a single pixel to tell the class. shape:
    (C, H, W). part: 0 for training, 1 for validation, which has other noise on the same pictures.
    """
    channels, height, width = shape
    coarse = np.random.default_rng(seed).random((n_classes, channels, GRID, GRID), np.float32)
    rows = np.arange(height) * GRID // height
    columns = np.arange(width) * GRID // width
    pictures = 255 * coarse[:, :, rows[:, None], columns]
    labels = np.arange(n_rows) % n_classes

    def make(wanted: slice) -> np.ndarray:
        """Rows of one block, beginning anywhere in it."""
        block, first = divmod(wanted.start, BLOCK_ROWS)
        rng = np.random.default_rng((seed, 1 + part, block))
        noise = rng.standard_normal((wanted.stop - block * BLOCK_ROWS, *shape), np.float32)[first:]
        return np.clip(pictures[labels[wanted]] + NOISE * noise, 0, 255).astype(np.uint8)

    images: Columns = {"images": LazyColumn((n_rows, *shape), np.dtype(np.uint8), make), "labels": labels}
    names = {"class_names": [str(number) for number in range(n_classes)]}
    block_rows = np.diff(np.arange(0, n_rows, BLOCK_ROWS), append=n_rows).astype(np.int32)
    return Arrays(f"synthetic images, seed {seed}", images, names, block_rows=block_rows)
