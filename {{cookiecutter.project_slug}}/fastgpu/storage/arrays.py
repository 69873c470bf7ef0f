"""Rows that lie in arrays: in RAM, in .npy files that are mapped, or in sparse matrices."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from fastgpu.rows.contract import BlockRead, Source
from fastgpu.rows.field import Field
from fastgpu.rows.rows import RaggedArray

BLOCK_BYTES = 2 << 20  # of neighbouring rows: what lies on a disk is not read row by row


class Arrays(Source):
    """Columns of equal length as a source of blocks.

    columns: {field: (N, *shape) or RaggedArray of N rows}. block_rows: (blocks,) rows of each, if they are not to be
    cut into about 2 MiB. below: {ragged field: number of items that its values are from}.
    """

    def __init__(
        self,
        name: str,
        columns: Mapping[str, np.ndarray | RaggedArray],
        attributes: Mapping[str, Any] | None = None,
        block_rows: np.ndarray | None = None,
        n_items: Mapping[str, int | None] | None = None,
    ):
        self.name, self._columns, self.attributes = name, columns, dict(attributes or {})
        self.fields, self.lengths = dict[str, Field](), dict[str, np.ndarray]()
        for key, column in columns.items():
            if isinstance(column, RaggedArray):
                self.lengths[key] = np.diff(column.offsets).astype(np.int32)
                mean = float(self.lengths[key].mean())
                self.fields[key] = Field(column.values.dtype, (), mean, (n_items or {}).get(key))
            else:
                self.fields[key] = Field(column.dtype.newbyteorder("="), column.shape[1:])
        if block_rows is None:
            step = max(1, BLOCK_BYTES // max(1, self.row_bytes))
            block_rows = np.diff(np.arange(0, len(self), step), append=len(self)).astype(np.int32)
        self.block_rows = block_rows
        self._block_start = np.cumsum(block_rows, dtype=np.int64) - block_rows

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def column(self, name: str) -> np.ndarray:
        """One field of all rows, (rows, *shape); raises KeyError for a ragged one."""
        column = self._columns[name]
        if isinstance(column, RaggedArray):
            raise KeyError(name)
        return column

    def ragged(self, name: str) -> RaggedArray:
        """The rows of a ragged field; raises KeyError for another one."""
        if name not in self.lengths:
            raise KeyError(name)
        return self._columns[name]  # type: ignore[return-value]

    def read(self, reads: Iterable[BlockRead], out: Mapping[str, Any]) -> None:
        """Rows first, first + 1, ... of each block -> out[field][places]. Thread-safe."""
        for block, first, places in reads:
            start = int(self._block_start[block]) + first
            stop = start + len(places)
            for name, column in self._columns.items():
                if isinstance(column, RaggedArray):
                    values = column.values[column.offsets[start] : column.offsets[stop]]
                    out[name].values[out[name].places(places)] = values
                else:
                    out[name][places] = column[start:stop]
