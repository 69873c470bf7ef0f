"""The type of one field of a row: a fixed shape, or any number of values."""

from math import ceil, prod
from typing import NamedTuple

import numpy as np

CODECS = {0xFF: "jpeg", 0x89: "png", 0x52: "webp"}
"""First byte of an encoded image -> its format."""
LONG_ROW_BYTES = 4096
"""Ragged rows of this size in the mean are copied one by one, shorter ones by one indexed copy."""
OFFSET_DTYPE = np.dtype(np.int32)
"""Type of the offsets of ragged rows on the device: torch's embedding_bag wants the type of the values."""
MAX_VALUES = np.iinfo(OFFSET_DTYPE).max
"""Maximum number of ragged values that lie together on a device."""


class Field(NamedTuple):
    """The type of one field: `dtype` and `shape` of one row, or any number of scalar values if it is ragged."""

    dtype: np.dtype
    shape: tuple[int, ...]
    mean_values: float | None = None
    """Mean number of values in a row, if the field is ragged; None if it is not."""
    n_items: int | None = None
    """If the values are item numbers: the number of items. Each value is in range(n_items)."""
    codec: str = ""
    """If the values of a row are the bytes of an image file: the formats of these files, such as jpeg or jpeg+png."""

    @property
    def is_ragged(self) -> bool:
        return self.mean_values is not None

    @property
    def signature(self) -> tuple[np.dtype, tuple[int, ...], bool, int | None, bool]:
        """The properties that two sources must share for their rows to lie in one pool."""
        return self.dtype, self.shape, self.is_ragged, self.n_items, bool(self.codec)

    def __str__(self) -> str:
        if self.codec:
            return f"{self.codec} images of any size (N, {ceil(self.mean_values or 0):,} bytes in the mean)"
        if self.is_ragged:
            limit = f" below {self.n_items}" if self.n_items else ""
            return f"{self.dtype} (N, any number){limit}"
        dimensions = "".join(f", {n}" for n in self.shape)
        return f"{self.dtype} (N{dimensions})"

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; the mean over the source if the field is ragged."""
        if self.mean_values is not None:
            return OFFSET_DTYPE.itemsize + ceil(self.mean_values * self.dtype.itemsize)
        return self.dtype.itemsize * prod(self.shape)
