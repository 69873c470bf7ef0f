"""Rows that lie in arrays: in memory, in mapped .npy files, or in sparse matrices."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fastgpu.rows.contract import PoolPlan, Reads, Source
from fastgpu.rows.rows import LONG_ROW_BYTES, Field, RaggedArray
from fastgpu.storage.layout import BLOCK_BYTES


def is_channels_last(column: np.ndarray) -> bool:
    """Whether images (N, C, H, W) lie in memory as (N, H, W, C)."""
    if not isinstance(column, np.ndarray) or column.ndim != 4 or column.flags.c_contiguous:
        return False
    return column.transpose(0, 2, 3, 1).flags.c_contiguous


class Arrays(Source):
    """Columns of equal length as a source of blocks."""

    def __init__(
        self,
        name: str,
        columns: Mapping[str, np.ndarray | RaggedArray],
        attributes: Mapping[str, Any] | None = None,
        *,
        block_rows: np.ndarray | None = None,
        n_items: Mapping[str, int | None] | None = None,
    ):
        """columns: {field: array (rows, *shape), or RaggedArray of as many rows}.

        block_rows: (blocks,) number of rows in each block. None: blocks of about 2 MiB, because mapped files are not to
        be read row by row. n_items: {ragged field: number of items, if its values are item numbers}.
        """
        self.name = name
        self.attributes = dict(attributes or {})
        self.fields: dict[str, Field] = {}
        self.lengths: dict[str, np.ndarray] = {}
        self._columns = columns
        for field, column in columns.items():
            if isinstance(column, RaggedArray):
                lengths = np.diff(column.offsets).astype(np.int32)
                self.lengths[field] = lengths
                self.fields[field] = Field(column.values.dtype, (), float(lengths.mean()), (n_items or {}).get(field))
            else:
                dtype = column.dtype.newbyteorder("=")
                self.fields[field] = Field(dtype, column.shape[1:], is_channels_last=is_channels_last(column))
        if block_rows is None:
            n_rows = len(next(iter(columns.values())))
            step = max(1, BLOCK_BYTES // max(1, self.row_bytes))
            block_rows = np.diff(np.arange(0, n_rows, step), append=n_rows).astype(np.int32)
        self.block_rows = block_rows

    def column(self, name: str) -> np.ndarray:
        """One field of all rows, (rows, *shape). Raises KeyError if it is ragged."""
        column = self._columns[name]
        if isinstance(column, RaggedArray):
            raise KeyError(name)
        return column

    def ragged(self, name: str) -> RaggedArray:
        """One ragged field of all rows. Raises KeyError if it is not ragged."""
        column = self._columns[name]
        if not isinstance(column, RaggedArray):
            raise KeyError(name)
        return column

    def read(self, plan: PoolPlan, reads: Reads, out: Mapping[str, Any]) -> None:
        """Copy the rows of each read to their places (see `Source.read`). Thread-safe."""
        for start, places in reads.ranges():
            stop = start + len(places)
            for name, column in self._columns.items():
                if isinstance(column, RaggedArray) and self.fields[name].row_bytes >= LONG_ROW_BYTES:
                    for row, target in out[name].runs(places):
                        begin = int(column.offsets[start + row])
                        out[name].values[target.start : target.stop] = column.values[begin : begin + len(target)]
                elif isinstance(column, RaggedArray):
                    values = column.values[column.offsets[start] : column.offsets[stop]]
                    out[name].values[out[name].places(places)] = values
                else:
                    out[name][places] = column[start:stop]
