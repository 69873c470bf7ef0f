"""The items of a torch Dataset, which may be broken; `Reader` says how broken rows are treated."""

from functools import cached_property
from typing import Any

import numpy as np

from fastgpu.dataset.items import Columns
from fastgpu.dataset.source import ItemDataset
from fastgpu.dataset.workers import describe_error
from fastgpu.process.launch import UserError
from fastgpu.rows.rows import RaggedArray


class Items(ItemDataset):
    """The rows of a Dataset. A row is broken if its item raises an exception, or has another type or shape.

    A broken row reads as zeros, or as a ragged row without values.
    """

    @cached_property
    def broken(self) -> dict[int, str]:
        """{row: reason} of the broken rows among the rows that were read."""
        return {}

    def _read_samples(self, rows: np.ndarray) -> tuple[dict[str, list[np.ndarray]], set[str]]:
        """See `ItemDataset`. Only rows that are not broken decide the types."""
        try:
            return super()._read_samples(rows)
        except Exception:
            whole = [row for row in rows.tolist() if self._can_read(row)]
            if not whole:
                raise
            return super()._read_samples(np.array(whole))

    def _can_read(self, row: int) -> bool:
        try:
            self.dataset[row]
        except Exception:
            return False
        return True

    def read_rows(self, rows: np.ndarray, seed: int, epoch: int, repeats: np.ndarray) -> Columns:
        answer: Any = super().read_rows(rows, seed, epoch, repeats)
        columns, broken = answer
        self.broken |= broken
        return columns

    def _read_here(self, rows: np.ndarray, seed: int, epoch: int, repeats: np.ndarray) -> Any:
        """(columns, {row: reason}). A worker sends both to `read_rows`."""
        try:
            return super()._read_here(rows, seed, epoch, repeats), {}
        except Exception:  # read again row by row, to find the broken ones
            parts, broken = [], {}
            for place, row in enumerate(rows.tolist()):
                one = slice(place, place + 1)
                try:
                    parts.append(super()._read_here(rows[one], seed, epoch, repeats[one]))
                except Exception as error:
                    error.__notes__ = []  # they name the row
                    reason = f"{self.name}: row {row} cannot be read: {describe_error(error)}"
                    broken[row] = str(error) if isinstance(error, UserError) else reason
                    parts.append(self._nothing())
        return {name: _join([part[name] for part in parts]) for name in self.fields}, broken

    def _nothing(self) -> Columns:
        """The columns of a broken row."""
        columns: Columns = {}
        for name, field in self.fields.items():
            values = np.zeros((int(not field.is_ragged), *field.shape), field.dtype)
            columns[name] = RaggedArray(values, np.zeros(2, np.int64)) if field.is_ragged else values
        return columns


def _join(columns: list[Any]) -> np.ndarray | RaggedArray:
    """Concatenate columns of one field."""
    if not isinstance(columns[0], RaggedArray):
        return np.concatenate(columns)
    offsets = np.cumsum([0, *(len(each.values) for each in columns)])
    return RaggedArray(np.concatenate([each.values for each in columns]), offsets)
