"""The items of a torch Dataset, some of which may be broken: see `Reader` for what becomes of those."""

from functools import cached_property
from typing import Any

import numpy as np

from fastgpu.dataset.items import Columns
from fastgpu.dataset.source import ItemDataset
from fastgpu.dataset.workers import describe_error
from fastgpu.process.launch import UserError
from fastgpu.rows.rows import RaggedArray


class Items(ItemDataset):
    """The rows of a Dataset. Those whose item raises an exception, or has another type or shape, are broken.

    They are zeros, or have no values.
    """

    @cached_property
    def broken(self) -> dict[int, str]:
        """{row: why it is broken} of the rows that were read."""
        return {}

    def _read_samples(self, rows: np.ndarray) -> tuple[dict[str, list[np.ndarray]], set[str]]:
        """See `ItemDataset`. If some of these rows are broken, those that are not tell the types."""
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
        """(columns, {row: why it is broken}). In a worker, it is the answer that `read_rows` takes."""
        try:
            return super()._read_here(rows, seed, epoch, repeats), {}
        except Exception:  # once more, one row at a time
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
    """The rows of some columns, one after the other."""
    if not isinstance(columns[0], RaggedArray):
        return np.concatenate(columns)
    offsets = np.cumsum([0, *(len(each.values) for each in columns)])
    return RaggedArray(np.concatenate([each.values for each in columns]), offsets)
