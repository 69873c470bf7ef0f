"""Rows in arrays: in memory, in mapped .npy files, or in sparse matrices."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fastgpu.rows.contract import Dataset, Out, PoolPlan, Range, Reads
from fastgpu.rows.rows import Field, RaggedArray
from fastgpu.storage.columns import InMemory, RaggedColumn
from fastgpu.storage.layout import BLOCK_BYTES


class ArrayDataset(Dataset):
    """Arrays of equal length as rows in blocks."""

    unit_rows = 1
    """See `HDF5Dataset`. Arrays are not compressed, so each row can be read alone."""

    def __init__(
        self,
        name: str,
        arrays: Mapping[str, np.ndarray | RaggedArray],
        attributes: Mapping[str, Any] | None = None,
        *,
        block_rows: np.ndarray | None = None,
        fields: Mapping[str, Field] | None = None,
    ):
        """arrays: {field: array (rows, *shape), or RaggedArray}. block_rows: (blocks,) number of rows in each block.
        None: blocks of about 2 MiB, because reading mapped files row by row is slow. fields: types of ragged fields, if
        they have more than a dtype and a shape.
        """
        self.name = name
        self.attributes = dict(attributes or {})
        self.columns: dict[str, Any] = {}
        for field_name, array in arrays.items():
            if isinstance(array, RaggedArray):
                values = InMemory(array.values)
                field = (fields or {}).get(field_name, values.field)
                self.columns[field_name] = RaggedColumn(field, values, array.offsets)
            else:
                self.columns[field_name] = InMemory(array)
        self.fields = {field_name: column.field for field_name, column in self.columns.items()}
        self.stored_lengths = {name: each.lengths for name, each in self.columns.items() if hasattr(each, "lengths")}
        if block_rows is None:
            step = max(1, BLOCK_BYTES // max(1, self.row_bytes))
            n_rows = len(next(iter(arrays.values())))
            block_rows = np.diff(np.arange(0, n_rows, step), append=n_rows).astype(np.int32)
        self.block_rows = block_rows

    def stored_column(self, name: str) -> np.ndarray | None:
        column = self.columns.get(name)
        return column.rows if isinstance(column, InMemory) else None

    def read(self, plan: PoolPlan, reads: Reads, out: Mapping[str, Out]) -> None:
        self.read_ranges(plan, reads.ranges(), out)

    def read_ranges(self, plan: PoolPlan, ranges: Iterable[Range], out: Mapping[str, Out]) -> None:
        """Like `read`, for ranges. The places of a range may be neighbours."""
        ranges = [*ranges]
        for name, column in self.columns.items():
            column.read(ranges, out[name])

    def view(self, start: int, n_rows: int) -> Sequence[np.ndarray] | None:
        """Views of the bytes of neighbouring rows, one for each field. None if a field is not in one piece."""
        views = [column.view(start, n_rows) for column in self.columns.values()]
        return None if any(view is None for view in views) else views

    def check_unchanged(self, rows: np.ndarray) -> None:
        """Nothing to check: the arrays belong to this process."""
