"""Rows: columns of equal length, moved, sliced and gathered together.

A column is a tensor (rows, ...), or `Ragged`: rows of any number of values each, such as a user's items.

Shapes: B rows, N values of all of them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastgpu.rows.field import OFFSET, Field


class RaggedArray(NamedTuple):
    """Rows of any number of values each, in host memory: row b is values[offsets[b] : offsets[b + 1]]."""

    values: np.ndarray
    """(N or more,)"""
    offsets: np.ndarray
    """(B + 1,), int32 or int64, from 0 on."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def places(self, rows: np.ndarray) -> np.ndarray:
        """(n,) int64: where the values of `rows` lie in `values`, one row after the other."""
        starts = self.offsets[rows].astype(np.int64)
        counts = self.offsets[rows + 1] - starts
        ends = np.cumsum(counts)
        places = np.repeat(starts - ends + counts, counts)
        places += np.arange(len(places))
        return places


@dataclass(frozen=True)
class Ragged:
    """Rows of any number of values each, on a device: row b is values[offsets[b] : offsets[b + 1]].

    host: the offsets in host memory, so that no size is ever asked of the device.
    """

    values: Tensor
    """(N or more,)"""
    offsets: Tensor
    """(B + 1,) int32, from 0 on, as torch's embedding_bag takes them (include_last_offset)."""
    host: np.ndarray
    """(B + 1,) int32: the same numbers."""

    @classmethod
    def empty(cls, dtype: np.dtype, rows: int, values: int, device: torch.device, pinned: bool = False) -> "Ragged":
        """Memory for `rows` rows of `values` values in all."""
        offsets = _memory((rows + 1,), OFFSET, device, pinned).zero_()
        host = offsets.numpy() if device.type == "cpu" else np.zeros(rows + 1, OFFSET)
        return cls(_memory((values,), dtype, device, pinned), offsets, host)

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.offsets.nbytes

    def __len__(self) -> int:
        return len(self.host) - 1

    def __getitem__(self, rows: slice) -> "Ragged":
        """Neighbouring rows: their values as a view, their offsets from 0 on."""
        start, stop, _ = rows.indices(len(self))
        lo, hi = int(self.host[start]), int(self.host[stop])
        offsets, host = self.offsets[start : stop + 1], self.host[start : stop + 1]
        return Ragged(self.values[lo:hi], offsets - lo if lo else offsets, host - OFFSET.type(lo) if lo else host)

    @property
    def rows(self) -> Tensor:
        """(N,) int32: the row of each value."""
        numbers = torch.arange(len(self), dtype=torch.int32, device=self.device)
        return numbers.repeat_interleave(self.offsets.diff(), output_size=len(self.values))

    def take(self, index: np.ndarray, out: "Ragged | None" = None) -> "Ragged":
        """A copy of the rows at `index`, (n,) on the host, in the memory of `out` if there is one."""
        starts, counts = self.host[index], self.host[index + 1] - self.host[index]
        out = out or Ragged.empty(_numpy_dtype(self.values), len(index), int(counts.sum()), self.device)
        host = out.host[: len(index) + 1]
        np.cumsum(counts, out=host[1:])
        moves = torch.from_numpy(np.stack([starts - host[:-1], counts, host[1:]])).to(self.device, non_blocking=True)
        total = int(host[-1])
        places = torch.arange(total, dtype=torch.int32, device=self.device)
        places += moves[0].repeat_interleave(moves[1], output_size=total)
        values = torch.index_select(self.values, 0, places, out=out.values[:total])
        offsets = out.offsets[: len(index) + 1]
        offsets[1:].copy_(moves[2])
        return Ragged(values, offsets, host)

    def to(self, device: torch.device, non_blocking: bool = False) -> "Ragged":
        values = self.values.to(device, non_blocking=non_blocking)
        return Ragged(values, self.offsets.to(device, non_blocking=non_blocking), self.host)

    def copy_(self, other: "Ragged", non_blocking: bool = False) -> None:
        """Overwrite with as many values; `host` must hold their offsets already."""
        self.values.copy_(other.values, non_blocking=non_blocking)
        self.offsets.copy_(other.offsets, non_blocking=non_blocking)

    def numpy(self) -> RaggedArray:
        return RaggedArray(self.values.numpy(), self.host)


@dataclass(frozen=True)
class Rows:
    """{field: column of that many rows}; `rows["images"]` is one field."""

    columns: Mapping[str, Any]
    """Tensor (rows, ...) or Ragged."""

    @classmethod
    def empty(
        cls,
        fields: Mapping[str, Field],
        rows: int,
        device: torch.device,
        pinned: bool = False,
        values: Mapping[str, int] | None = None,
    ) -> "Rows":
        """Memory for `rows` rows, page-locked if `pinned`. values: {ragged field: of all rows together}."""
        return cls({
            name: Ragged.empty(field.dtype, rows, (values or {})[name], device, pinned) if field.is_ragged
            else _memory((rows, *field.shape), field.dtype, device, pinned)
            for name, field in fields.items()
        })  # fmt: skip

    def on(self, device: torch.device) -> "Rows":
        """Memory of the same size there; the offsets on the host are the same memory."""
        return Rows({
            name: Ragged(torch.empty_like(column.values, device=device),
                         torch.empty_like(column.offsets, device=device), column.host)
            if isinstance(column, Ragged) else torch.empty_like(column, device=device)
            for name, column in self.columns.items()
        })  # fmt: skip

    def __getitem__(self, name: str) -> Any:
        return self.columns[name]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in self.columns.values())

    @property
    def has_ragged(self) -> bool:
        return any(isinstance(column, Ragged) for column in self.columns.values())

    def slice(self, start: int, stop: int) -> "Rows":
        """Rows start..stop as views: no row moves."""
        return Rows({name: column[start:stop] for name, column in self.columns.items()})

    def batches(self, batch_rows: int) -> Iterator["Rows"]:
        """Views of `batch_rows` rows each, the last maybe of fewer."""
        return (self.slice(start, start + batch_rows) for start in range(0, len(self), batch_rows))

    def take(self, index: Tensor, out: "Rows | None" = None) -> "Rows":
        """A copy of the rows at `index`, (n,) int64, in the memory of `out` if there is one, which has room.

        index: on the rows' device or the host; on the host if there is a ragged column.
        """
        found: dict[str, Any] = {}
        for name, column in self.columns.items():
            room = out[name] if out else None
            if isinstance(column, Ragged):
                found[name] = column.take(index.numpy(), room)
            else:
                where = index.to(column.device, non_blocking=True)
                found[name] = torch.index_select(column, 0, where, out=None if room is None else room[: len(index)])
        return Rows(found)

    def to(self, device: torch.device, non_blocking: bool = False) -> "Rows":
        return Rows({name: column.to(device, non_blocking=non_blocking) for name, column in self.columns.items()})

    def copy_(self, other: "Rows", non_blocking: bool = False) -> None:
        """Overwrite with the rows of `other`, which has as many."""
        for name, column in self.columns.items():
            column.copy_(other[name], non_blocking=non_blocking)

    def numpy(self) -> dict[str, Any]:
        """The same memory as arrays or RaggedArray (host only)."""
        return {name: column.numpy() for name, column in self.columns.items()}


def _memory(shape: tuple[int, ...], dtype: np.dtype, device: torch.device, pinned: bool) -> Tensor:
    if device.type == "cpu" and not pinned:  # NumPy asks for huge pages, torch does not: 7 % faster to fill
        return torch.from_numpy(np.empty(shape, dtype))
    return torch.empty(shape, dtype=_torch_dtype(dtype), device=device, pin_memory=pinned)


def _torch_dtype(dtype: np.dtype) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def _numpy_dtype(tensor: Tensor) -> np.dtype:
    return torch.empty(0, dtype=tensor.dtype).numpy().dtype
