"""Rows that lie in arrays: in memory, in mapped .npy files, or in sparse matrices."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fastgpu.rows.rows import Field, RaggedArray
from fastgpu.storage.columns import Column, ColumnDataset, InMemory, RaggedColumn
from fastgpu.storage.layout import BLOCK_BYTES


class ArrayDataset(ColumnDataset):
    """Arrays of equal length as rows in blocks."""

    def __init__(
        self,
        name: str,
        arrays: Mapping[str, np.ndarray | RaggedArray],
        attributes: Mapping[str, Any] | None = None,
        *,
        block_rows: np.ndarray | None = None,
        fields: Mapping[str, Field] | None = None,
    ):
        """arrays: {field: array (rows, *shape), or RaggedArray of as many rows}.

        block_rows: (blocks,) number of rows in each block. None: blocks of about 2 MiB, because mapped files are not to
        be read row by row. fields: types of ragged fields, if these are more than a dtype and a shape.
        """
        columns: dict[str, Column] = {}
        for field_name, array in arrays.items():
            if isinstance(array, RaggedArray):
                values = InMemory(array.values)
                field = (fields or {}).get(field_name, values.field)
                columns[field_name] = RaggedColumn(field, values, array.offsets)
            else:
                columns[field_name] = InMemory(array)
        if block_rows is None:
            row_bytes = sum(column.field.row_bytes for column in columns.values())
            step = max(1, BLOCK_BYTES // max(1, row_bytes))
            n_rows = len(next(iter(arrays.values())))
            block_rows = np.diff(np.arange(0, n_rows, step), append=n_rows).astype(np.int32)
        super().__init__(name, [columns], [block_rows], dict(attributes or {}))
