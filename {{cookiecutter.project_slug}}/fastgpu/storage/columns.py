"""Rows as columns, one for each field: in memory, in a file (layout.py), or ragged, whose values are one of these."""

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

import numpy as np

from fastgpu.rows.contract import Dataset, Out, PoolPlan, Reads
from fastgpu.rows.rows import LONG_ROW_BYTES, Field, RaggedArray
from fastgpu.storage.file import scratch
from fastgpu.storage.layout import Layout, Range, index_of


class Column(Protocol):
    """One field of the rows of a file, or of arrays."""

    field: Field

    def read(self, ranges: Iterable[Range], out: Any, plan: PoolPlan | None = None) -> None:
        """Copy the rows of each range to their places in `out`: (rows, *shape), or a RaggedArray. Thread-safe.

        plan: see `Dataset.read`.
        """


class InMemory:
    """Rows in an array, or in a mapped .npy file."""

    def __init__(self, rows: np.ndarray):
        """rows: (rows, *shape)"""
        is_interleaved = isinstance(rows, np.ndarray) and rows.ndim == 4 and not rows.flags.c_contiguous
        is_channels_last = is_interleaved and rows.transpose(0, 2, 3, 1).flags.c_contiguous
        self.field = Field(rows.dtype.newbyteorder("="), rows.shape[1:], is_channels_last=is_channels_last)
        self.rows = rows

    def read(self, ranges: Iterable[Range], out: np.ndarray, plan: PoolPlan | None = None) -> None:
        """See `Column.read`."""
        rows = self.rows
        if self.field.is_channels_last:  # copied as it lies in memory
            rows = rows.transpose(0, 2, 3, 1)
            out = out.transpose(0, 2, 3, 1)
        for start, places in ranges:
            out[index_of(places)] = rows[start : start + len(places)]

    def in_memory(self, ranges: Iterable[Range]) -> np.ndarray:
        """(rows, bytes) uint8: all rows."""
        return self.rows.reshape(len(self.rows), -1).view(np.uint8)

    def fingerprint(self) -> bytes:
        """The SHA-256 of all rows."""
        return hashlib.sha256(self.rows.data).digest()


class RaggedColumn:
    """Rows with any number of values each."""

    def __init__(self, field: Field, values: InMemory | Layout, indptr: np.ndarray):
        """field: the type of a value. values: (N, *shape), those of one row after the other. indptr: (rows + 1,) where
        those of each row begin."""
        self.field = field._replace(mean_values=float(indptr[-1]) / max(1, len(indptr) - 1))
        self.values = values
        self.indptr = indptr

    def __len__(self) -> int:
        return len(self.indptr) - 1

    def fingerprint(self) -> bytes:
        """The SHA-256 of `indptr`, and what stands for the values."""
        return hashlib.sha256(self.indptr.data).digest() + self.values.fingerprint()

    def read(self, ranges: Iterable[Range], out: RaggedArray, plan: PoolPlan | None = None) -> None:
        """See `Column.read`."""
        self.values.read(self._ranges_of_values(ranges, out), out.values)

    def _ranges_of_values(self, ranges: Iterable[Range], out: RaggedArray) -> Iterator[Range]:
        """A range of rows is a range of values. One is made when it is copied: together they would displace each other
        from the caches of the CPU."""
        for start, places in ranges:
            if self.field.row_bytes < LONG_ROW_BYTES:
                yield int(self.indptr[start]), out.places(np.asarray(places))
                continue
            for row, place in enumerate(places, start):
                yield int(self.indptr[row]), range(int(out.offsets[place]), int(out.offsets[place + 1]))

    def read_rows(self, start: int, n_rows: int) -> RaggedArray:
        """The rows start, start + 1, ... in scratch memory of this thread."""
        lo, hi = int(self.indptr[start]), int(self.indptr[start + n_rows])
        offsets = self.indptr[start : start + n_rows + 1] - lo
        values = scratch((hi - lo) * self.field.dtype.itemsize, "ragged").view(self.field.dtype)
        self.values.read([(lo, range(hi - lo))], values)
        return RaggedArray(values, offsets)


class ColumnDataset(Dataset):
    """Rows whose fields are columns, in parts one after the other, such as files."""

    def __init__(
        self,
        name: str,
        parts: Sequence[Mapping[str, Any]],
        part_blocks: Sequence[np.ndarray],
        attributes: dict[str, Any],
    ):
        """parts: {field: its column} of each part. part_blocks: (blocks,) number of rows in each block of each part."""
        self.name = name
        self.parts = parts
        self.part_rows = [int(block_rows.sum()) for block_rows in part_blocks]
        self.first_rows = [0, *accumulate(self.part_rows[:-1])]
        self.block_rows = np.concatenate(part_blocks)
        self.attributes = attributes
        self.fields = {field: column.field for field, column in parts[0].items()}
        self.lengths = {}
        for name, field in self.fields.items():
            if field.is_ragged:
                self.lengths[name] = np.concatenate([np.diff(part[name].indptr).astype(np.int32) for part in parts])
                self.fields[name] = field._replace(mean_values=float(self.lengths[name].mean()))

    def column(self, name: str) -> np.ndarray | None:
        """One field of all rows, (rows, *shape). None if it is ragged, or not in memory."""
        arrays = [column.rows for part in self.parts if isinstance(column := part.get(name), InMemory)]
        return np.concatenate(arrays) if len(arrays) == len(self.parts) else None

    def read(self, plan: PoolPlan, reads: Reads, out: Mapping[str, Out]) -> None:
        """Copy the rows of each read to their places (see `Dataset.read`). Thread-safe.

        Raises OSError or UserError if a file cannot give the bytes.
        """
        ranges: dict[int, list[Range]] = {}
        for start, places in reads.ranges():
            number = bisect_right(self.first_rows, start) - 1
            ranges.setdefault(number, []).append((start - self.first_rows[number], places))
        for number, ranges_of_part in ranges.items():
            for name, column in self.parts[number].items():
                column.read(ranges_of_part, out[name], plan)
