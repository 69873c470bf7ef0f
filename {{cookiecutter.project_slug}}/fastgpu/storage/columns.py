"""Columns: the rows of one field. Each kind of column has `field`, `read` and `fingerprint`.

InMemory         an array
Layout           a dataset of an HDF5 file (layout.py)
RaggedColumn     rows with any number of values each
DecodedColumn    rows of one shape that are decoded from a ragged column, such as pixels of JPEG files

`read(ranges, out, plan)` copies the rows of each range to their places in `out`: (rows, *shape), or a RaggedArray. It
is thread-safe. `plan` is the plan of the pool (see `Dataset.read`). `fingerprint()` is a hash of the stored rows.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from fastgpu.process.launch import UserError
from fastgpu.rows.contract import PoolPlan, Range
from fastgpu.rows.rows import LONG_ROW_BYTES, Field, RaggedArray
from fastgpu.storage.file import RESTORE, scratch
from fastgpu.storage.filters import DECODING
from fastgpu.storage.layout import Layout, index_of


class InMemory:
    """Rows in an array, or in a mapped .npy file."""

    def __init__(self, rows: np.ndarray, n_items: int | None = None):
        """rows: (rows, *shape). n_items: the number of items, if the values are item numbers."""
        is_interleaved = isinstance(rows, np.ndarray) and rows.ndim == 4 and not rows.flags.c_contiguous
        is_channels_last = is_interleaved and rows.transpose(0, 2, 3, 1).flags.c_contiguous
        dtype = rows.dtype.newbyteorder("=")
        self.field = Field(dtype, rows.shape[1:], n_items=n_items, is_channels_last=is_channels_last)
        self.rows = rows

    def read(self, ranges: Iterable[Range], out: np.ndarray, plan: PoolPlan | None = None) -> None:
        rows = self.rows
        if self.field.is_channels_last:  # copying in memory order is faster
            rows = rows.transpose(0, 2, 3, 1)
            out = out.transpose(0, 2, 3, 1)
        for start, places in ranges:
            out[index_of(places)] = rows[start : start + len(places)]

    def __len__(self) -> int:
        return len(self.rows)

    def view(self, start: int, n_rows: int) -> np.ndarray | None:
        """(bytes,) uint8: a view of neighbouring rows in the format of a pool. None if they have another format."""
        rows = self.rows[start : start + n_rows]
        return rows.reshape(-1).view(np.uint8) if rows.dtype.isnative and rows.flags.c_contiguous else None

    def cached_rows(self, ranges: Iterable[Range]) -> np.ndarray:
        """All rows, (rows, bytes) uint8."""
        return self.rows.reshape(len(self.rows), -1).view(np.uint8)

    def fingerprint(self) -> bytes:
        return hashlib.sha256(self.rows.data).digest()


class RaggedColumn:
    """Rows with any number of values each."""

    def __init__(self, field: Field, values: InMemory | Layout, indptr: np.ndarray):
        """field: the type of a value. values: (N, *shape), the values of all rows in the order of the rows. indptr:
        (rows + 1,), the number of the first value of each row."""
        self.field = field._replace(mean_values=float(indptr[-1]) / max(1, len(indptr) - 1))
        self.values = values
        self.indptr = indptr

    def __len__(self) -> int:
        return len(self.indptr) - 1

    @property
    def lengths(self) -> np.ndarray:
        """(rows,) int32: number of values in each row."""
        return np.diff(self.indptr).astype(np.int32)

    def fingerprint(self) -> bytes:
        return hashlib.sha256(self.indptr.data).digest() + self.values.fingerprint()

    def read(self, ranges: Iterable[Range], out: RaggedArray, plan: PoolPlan | None = None) -> None:
        self.values.read(self._ranges_of_values(ranges, out), out.values)

    def _ranges_of_values(self, ranges: Iterable[Range], out: RaggedArray) -> Iterator[Range]:
        """A range of values for each range of rows. Each is made just before it is copied: a list of all ranges would
        not stay in the caches of the CPU."""
        for start, places in ranges:
            if self.field.row_bytes < LONG_ROW_BYTES:
                yield int(self.indptr[start]), out.places(np.asarray(places))
                continue
            for row, place in enumerate(places, start):
                yield int(self.indptr[row]), range(int(out.offsets[place]), int(out.offsets[place + 1]))

    def read_rows(self, start: int, n_rows: int) -> RaggedArray:
        """Neighbouring rows, in scratch memory of this thread."""
        lo, hi = int(self.indptr[start]), int(self.indptr[start + n_rows])
        offsets = self.indptr[start : start + n_rows + 1] - lo
        values = scratch((hi - lo) * self.field.dtype.itemsize, "ragged").view(self.field.dtype)
        self.values.read([(lo, range(hi - lo))], values)
        return RaggedArray(values, offsets)


class Codec(Protocol):
    """Decodes rows of one shape, such as ImageCodec in images/column.py. `str` describes the decoding in words."""

    field: Field
    """The type of the decoded rows."""
    attributes: dict[str, Any]
    """Attributes that the decoding adds to a dataset."""

    def draw(self, plan: PoolPlan | None, row_ids: np.ndarray, places: np.ndarray) -> Sequence[Sequence[float]]:
        """Random numbers for each row, or none. row_ids, places: numbers of the rows in the dataset and in the pool."""

    def decode(self, data: np.ndarray, out: np.ndarray, draws: Sequence[float]) -> None:
        """Decode the bytes of a row, (bytes,) uint8, into `out`, (*shape). May raise anything for damaged bytes."""


class DecodedColumn(NamedTuple):
    """Encoded rows that a codec decodes while they are read."""

    codec: Codec
    encoded: RaggedColumn
    dataset: str
    """The name of the dataset, for messages."""
    first_row: int
    """The number of the column's first row in the dataset."""

    @property
    def field(self) -> Field:
        return self.codec.field

    def fingerprint(self) -> bytes:
        return self.encoded.fingerprint()

    def read(self, ranges: Iterable[Range], out: np.ndarray, plan: PoolPlan | None = None) -> None:
        """Decode rows to their places. Raises UserError if one is damaged."""
        for start, places in ranges:
            values, offsets = self.encoded.read_rows(start, len(places))
            row_ids = np.arange(start, start + len(places)) + self.first_row
            draws = self.codec.draw(plan, row_ids, np.asarray(places))
            bounds = offsets.tolist()
            with DECODING:  # timed once for a range, because a small image takes only microseconds
                for number, place in enumerate(places):
                    try:
                        self.codec.decode(values[bounds[number] : bounds[number + 1]], out[place], draws[number])
                    except Exception as error:
                        reason = " ".join(str(error).split())
                        cure = f"{RESTORE}, or convert the image files again with --on-error skip"
                        if isinstance(error, MemoryError) or "allocate memory" in reason:
                            cure = "free some memory, or use a smaller loader.num_readers"
                        where = f"{self.dataset}: the image in row {row_ids[number]:,}"
                        raise UserError(f"{where} cannot be decoded: {reason}; {cure}") from None
