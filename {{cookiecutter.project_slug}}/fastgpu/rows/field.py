"""What one row of a field is made of."""

from math import ceil
from typing import NamedTuple

import numpy as np

OFFSET = np.dtype(np.int32)  # of offsets on the device: torch's embedding_bag wants the type of the values
MOST_VALUES = np.iinfo(OFFSET).max  # that rows on a device may have together


class Field(NamedTuple):
    """What one row of a field is made of: a value of `shape`, or any number of values where it is ragged."""

    dtype: np.dtype
    shape: tuple[int, ...]
    mean_values: float | None = None
    """Of a ragged field: values of a row in the mean over its source."""
    below: int | None = None
    """Of a ragged field of item numbers: how many items there are. Every value is one of 0 to below - 1."""

    @property
    def is_ragged(self) -> bool:
        return self.mean_values is not None

    @property
    def kind(self) -> tuple[np.dtype, tuple[int, ...], bool, int | None]:
        """What rows must have in common to lie in one pool."""
        return self.dtype, self.shape, self.is_ragged, self.below

    def __str__(self) -> str:
        if not self.is_ragged:
            return f"{self.dtype} (N{''.join(f', {n}' for n in self.shape)})"
        return f"{self.dtype} (N, any number){f' below {self.below}' if self.below else ''}"

    @property
    def row_bytes(self) -> int:
        """Of a ragged field in the mean."""
        if self.mean_values is not None:
            return OFFSET.itemsize + ceil(self.mean_values * self.dtype.itemsize)
        return self.dtype.itemsize * int(np.prod(self.shape))
