"""Mean and standard deviation of images, while they are written.

Shapes: C channels, H and W pixels.
"""

from collections.abc import Mapping

import numpy as np

from fastgpu.rows.field import Field

MAX_ROWS = 10_000
"""Rows that are used at most. With so many, the error is below 1 % of the spread of the pixels."""
MIN_PIXELS = 1024
"""Pixels of a channel that are used at least, if a row has them. Rows differ more than the pixels of one row."""


class ImageStatistics:
    """Mean and standard deviation of each channel of the first uint8 field (C, H, W), from rows spread over all."""

    def __init__(self, fields: Mapping[str, Field], n_rows: int):
        self._name = next((name for name, field in fields.items() if _is_image(field)), None)
        self._row_step = -(-n_rows // MAX_ROWS)
        self._sums: list[np.ndarray] = []  # (3, C) for each row: number of pixels, their sum, the sum of their squares

    def add(self, rows: Mapping[str, np.ndarray], start: int) -> None:
        """Take note of the next rows. start: number of the first of them."""
        if self._name is None:
            return
        for image_CHW in rows[self._name][-start % self._row_step :: self._row_step]:
            pixel_step = image_CHW[0].size // MIN_PIXELS | 1  # odd, so that it does not stay in one column
            pixels = image_CHW.reshape(len(image_CHW), -1)[:, ::pixel_step].astype(np.float32)
            counts = np.full(len(image_CHW), pixels.shape[1])
            squares = np.einsum("cp,cp->c", pixels, pixels)
            self._sums.append(np.stack([counts, pixels.sum(1), squares]))

    def attributes(self) -> dict[str, list[float]]:
        """{"mean": C numbers, "std": C numbers}, or nothing if there are no images."""
        if not self._sums:
            return {}
        counts, totals, squares = np.stack(self._sums).sum(0, dtype=np.float64)
        mean = totals / counts
        std = np.sqrt(np.maximum(squares / counts - mean**2, 0))
        return {"mean": mean.round(4).tolist(), "std": np.maximum(std, 1e-3).round(4).tolist()}


def _is_image(field: Field) -> bool:
    return field.dtype == np.uint8 and len(field.shape) == 3
