"""Rows: tensors whose first dimensions agree, moved, sliced and gathered together."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor


class Field(NamedTuple):
    """What one row of a field is made of."""

    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * int(np.prod(self.shape))


class Source(Protocol):
    """Rows to be read in blocks: a `Store` of files, or `DatasetRows`."""

    name: str
    fields: dict[str, Field]
    attributes: dict[str, Any]
    block_rows: np.ndarray
    in_workers: bool
    """Whether worker processes read them, one row a block, maybe drawn anew in each epoch."""

    def __len__(self) -> int: ...

    @property
    def row_bytes(self) -> int:
        """Of all fields."""

    def column(self, name: str) -> np.ndarray:
        """One small field of all rows, (rows, *shape); raises KeyError if it is not at hand."""


@dataclass(frozen=True)
class Dense:
    """Rows of equal shape: {field: tensor of shape (rows, ...)}; `rows["images"]` is one field."""

    columns: Mapping[str, Tensor]

    @classmethod
    def empty(cls, fields: Mapping[str, Field], rows: int, device: torch.device, pinned: bool = False) -> "Dense":
        """Memory for `rows` rows, page-locked if `pinned`."""

        def make(shape: tuple[int, ...], dtype: np.dtype) -> Tensor:
            if device.type == "cpu" and not pinned:  # NumPy asks for huge pages, torch does not: 7 % faster to fill
                return torch.from_numpy(np.empty(shape, dtype))
            return torch.empty(shape, dtype=_torch_dtype(dtype), device=device, pin_memory=pinned)

        return cls({name: make((rows, *field.shape), field.dtype) for name, field in fields.items()})

    def like(self, rows: int) -> "Dense":
        """Memory for `rows` such rows on the same device."""
        return Dense({name: column.new_empty((rows, *column.shape[1:])) for name, column in self.columns.items()})

    @classmethod
    def cat(cls, parts: Sequence["Dense"]) -> "Dense":
        return cls({name: torch.cat([part[name] for part in parts]) for name in parts[0].columns})

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in self.columns.values())

    def slice(self, start: int, stop: int) -> "Dense":
        """Rows start..stop as views: no byte moves."""
        return Dense({name: column[start:stop] for name, column in self.columns.items()})

    def batches(self, batch_rows: int) -> Iterator["Dense"]:
        """Views of `batch_rows` rows each, the last maybe of fewer."""
        return (self.slice(start, start + batch_rows) for start in range(0, len(self), batch_rows))

    def take(self, index: Tensor, out: "Dense | None" = None) -> "Dense":
        """A copy of the rows at `index` (int64, on the rows' device), in the memory of `out` if there is one."""
        found = {}
        for name, column in self.columns.items():
            found[name] = torch.index_select(column, 0, index, out=out[name] if out else None)
        return Dense(found)

    def to(self, device: torch.device, non_blocking: bool = False) -> "Dense":
        return Dense({name: column.to(device, non_blocking=non_blocking) for name, column in self.columns.items()})

    def copy_(self, other: "Dense", non_blocking: bool = False) -> None:
        """Overwrite with the rows of `other`, which has as many."""
        for name, column in self.columns.items():
            column.copy_(other[name], non_blocking=non_blocking)

    def numpy(self) -> dict[str, np.ndarray]:
        """The same memory as arrays (host only)."""
        return {name: column.numpy() for name, column in self.columns.items()}


def _torch_dtype(dtype: np.dtype) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
