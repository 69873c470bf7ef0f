"""Rows that lie in arrays: in RAM, or in .npy files that are mapped."""

import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .launch import UserError
from .order import Read
from .rows import Field, RaggedArray

BLOCK_BYTES = 2 << 20  # of neighbouring rows: what lies on a disk is not read row by row


class Arrays:
    """Columns of equal length as a source of blocks.

    columns: {field: (N, *shape) or RaggedArray of N rows}. block_rows: (blocks,) rows of each, if they are not to be
    cut into about 2 MiB. below: {ragged field: number of items that its values are from}.
    """

    in_workers = False

    def __init__(
        self,
        name: str,
        columns: Mapping[str, np.ndarray | RaggedArray],
        attributes: Mapping[str, Any] | None = None,
        block_rows: np.ndarray | None = None,
        below: Mapping[str, int | None] | None = None,
    ):
        self.name, self._columns, self.attributes = name, columns, dict(attributes or {})
        self.fields, self.lengths = dict[str, Field](), dict[str, np.ndarray]()
        for key, column in columns.items():
            if isinstance(column, RaggedArray):
                self.lengths[key] = np.diff(column.offsets).astype(np.int32)
                mean = float(self.lengths[key].mean())
                self.fields[key] = Field(column.values.dtype, (), mean, (below or {}).get(key))
            else:
                self.fields[key] = Field(column.dtype.newbyteorder("="), column.shape[1:])
        if block_rows is None:
            step = max(1, BLOCK_BYTES // max(1, self.row_bytes))
            block_rows = np.diff(np.arange(0, len(self), step), append=len(self)).astype(np.int32)
        self.block_rows = block_rows
        self._block_start = np.cumsum(block_rows, dtype=np.int64) - block_rows

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    @property
    def row_bytes(self) -> int:
        return sum(field.row_bytes for field in self.fields.values())

    def column(self, name: str) -> np.ndarray:
        """One field of all rows, (rows, *shape); raises KeyError for a ragged one."""
        column = self._columns[name]
        if isinstance(column, RaggedArray):
            raise KeyError(name)
        return column

    def read(self, reads: Iterable[Read], out: Mapping[str, Any]) -> None:
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


def open_arrays(sources: Sequence[str]) -> Arrays:
    """`name=file.npy`, mapped, and `file.npz` with names of its own, read. Raises UserError for what cannot be rows."""
    columns: dict[str, np.ndarray] = {}
    for source in sources:
        name, _, path = source.rpartition("=")
        try:
            found = np.load(path, mmap_mode="r", allow_pickle=False)
            if isinstance(found, np.ndarray) == (not name):
                raise UserError(f"{source} should be name=file.npy, or file.npz alone")
            columns |= {name: found} if name else dict(found)
        except FileNotFoundError:
            raise UserError(f"{path} does not exist (looked in {Path.cwd()})") from None
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{path} holds no NumPy arrays of numbers: {error}") from None
    for name, column in columns.items():
        if column.ndim == 0 or column.dtype.kind not in "buif":
            raise UserError(f"{name} is {column.dtype} {column.shape}; allowed are rows of bool, integers and floats")
    if len(lengths := {name: len(column) for name, column in columns.items()}) and len(set(lengths.values())) > 1:
        raise UserError(f"the arrays are of unequal length {lengths}; give each as many rows")
    if not next(iter(lengths.values()), 0):
        raise UserError(f"{', '.join(sources)}: no rows")
    return Arrays(", ".join(sources), columns)
