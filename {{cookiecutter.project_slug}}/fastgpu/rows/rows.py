"""Rows in memory, such as a batch: columns that are moved, sliced and gathered together.

Each field is a column: a tensor (rows, ...), or a `Ragged` for rows with any number of values, such as the items of a
user. Shapes: B rows, N values of all rows together.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastgpu.process.launch import UserError
from fastgpu.rows.selection import Runs

LONG_ROW_BYTES = 4096
"""Ragged rows of this mean size or more are copied one by one, shorter rows with one indexed copy."""
OFFSET_DTYPE = np.dtype(np.int32)
"""Type of the offsets of ragged rows on the device: torch's embedding_bag requires the type of the values."""
SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""{unsigned type that torch cannot index: signed type of the same width, in which the bytes are moved}"""
MAX_VALUES = np.iinfo(OFFSET_DTYPE).max
"""Maximum number of values of a ragged column on a device."""


class Field(NamedTuple):
    """The type of a field: `dtype` and `shape` of a row, or of a single value if rows are ragged."""

    dtype: np.dtype
    shape: tuple[int, ...]
    mean_values: float | None = None
    """The mean number of values in a row of a ragged field. None: the field is not ragged."""
    n_items: int | None = None
    """The number of items, if the values are item numbers: each is in range(n_items)."""
    codec: str = ""
    """If rows are the bytes of image files: the formats of the files, such as jpeg or jpeg+png."""
    is_channels_last: bool = False
    """Whether rows of `shape` (C, H, W) are (H, W, C) in memory, which is the fastest layout for convolutions."""

    @property
    def is_ragged(self) -> bool:
        return self.mean_values is not None

    def fits(self, other: "Field") -> bool:
        """Whether rows of both fields may be in one pool: mean lengths and memory formats may differ."""
        if self.codec or other.codec:
            return bool(self.codec and other.codec)
        kinds = [(each.dtype, each.shape, each.is_ragged, each.n_items) for each in (self, other)]
        return kinds[0] == kinds[1]

    def __str__(self) -> str:
        if self.codec:
            return "encoded images of any size (N)"
        dimensions = ["N", *["any number"] * self.is_ragged, *map(str, self.shape)]
        return f"{self.dtype} ({', '.join(dimensions)})" + (f" below {self.n_items}" if self.n_items else "")

    @property
    def row_bytes(self) -> int:
        """Bytes of one row. For ragged fields: of a row of mean length, with its offset."""
        n_bytes = self.dtype.itemsize * prod(self.shape)
        return n_bytes if self.mean_values is None else OFFSET_DTYPE.itemsize + ceil(self.mean_values * n_bytes)


class RaggedArray(NamedTuple):
    """Ragged rows as NumPy arrays: row b is values[offsets[b] : offsets[b + 1]]."""

    values: np.ndarray
    """(N or more, *shape)"""
    offsets: np.ndarray
    """(B + 1,) int32 or int64, beginning with 0."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def places(self, rows: np.ndarray) -> np.ndarray:
        """(n,) int64: the indices of the values of `rows`, one row after the other."""
        starts = self.offsets[rows].astype(np.int64)
        return Runs(starts, self.offsets[rows + 1] - starts).numbers()


@dataclass(frozen=True)
class Ragged:
    """Ragged rows as tensors: row b is values[offsets[b] : offsets[b + 1]].

    A copy of the offsets stays in host memory, so the host never has to wait for the device to know a size.
    """

    values: Tensor
    """(N or more, *shape)"""
    offsets: Tensor
    """(B + 1,) int32, beginning with 0: embedding_bag takes them with include_last_offset."""
    host_offsets: np.ndarray
    """(B + 1,) int32: the same numbers in host memory."""

    @classmethod
    def of(cls, rows: Sequence[np.ndarray | Tensor]) -> "Ragged":
        """Ragged rows from a list of arrays or tensors, (any number, *shape), of one type on the CPU."""
        host_offsets = np.cumsum([0, *map(len, rows)], dtype=OFFSET_DTYPE)
        return cls(torch.cat([*map(torch.as_tensor, rows)]), torch.from_numpy(host_offsets), host_offsets)

    @property
    def shape(self) -> tuple[int | None, ...]:
        """(B, None, *shape), because rows have no common length."""
        return (len(self), None, *self.values.shape[1:])

    @property
    def device(self) -> torch.device:
        return self.values.device

    def __len__(self) -> int:
        return len(self.host_offsets) - 1

    def __getitem__(self, rows: slice) -> "Ragged":
        """Neighbouring rows. The values are a view; the offsets begin with 0."""
        start, stop, _ = rows.indices(len(self))
        lo, hi = int(self.host_offsets[start]), int(self.host_offsets[stop])
        offsets = self.offsets[start : stop + 1]
        host_offsets = self.host_offsets[start : stop + 1]
        if lo:
            offsets = offsets - lo
            host_offsets = host_offsets - OFFSET_DTYPE.type(lo)
        return Ragged(self.values[lo:hi], offsets, host_offsets)

    @property
    def rows(self) -> Tensor:
        """(N,) int32: the row of each value."""
        row_ids = torch.arange(len(self), dtype=torch.int32, device=self.device)
        return row_ids.repeat_interleave(self.offsets.diff(), output_size=len(self.values))

    def take(self, index: np.ndarray, out: Tensor | None = None) -> "Ragged":
        """A copy of the rows at `index`, (n,) in host memory. out: memory for the values."""
        starts = self.host_offsets[index]
        counts = self.host_offsets[index + 1] - starts
        host_offsets = np.zeros(len(index) + 1, OFFSET_DTYPE)
        np.cumsum(counts, out=host_offsets[1:])
        moves = to_device(torch.from_numpy(np.stack([starts - host_offsets[:-1], counts])), self.device)
        n_values = int(host_offsets[-1])
        places = torch.arange(n_values, dtype=torch.int32, device=self.device)
        places += moves[0].repeat_interleave(moves[1], output_size=n_values)
        values = _take(self.values, places, None if out is None else out[:n_values])
        return Ragged(values, to_device(torch.from_numpy(host_offsets), self.device), host_offsets)

    def to(self, device: torch.device) -> "Ragged":
        return Ragged(self.values.to(device), self.offsets.to(device), self.host_offsets)

    def copy_(self, other: "Ragged", non_blocking: bool = False) -> None:
        """Overwrite with the same number of values. `host_offsets` must already have the new offsets."""
        self.values.copy_(other.values, non_blocking=non_blocking)
        self.offsets.copy_(other.offsets, non_blocking=non_blocking)

    def numpy(self) -> RaggedArray:
        """The same memory as NumPy arrays. Host only."""
        return RaggedArray(self.values.numpy(), self.host_offsets)


@dataclass(frozen=True)
class Rows:
    """Columns of equal length, one for each field: `rows["images"]`."""

    columns: dict[str, Tensor | Ragged]

    @classmethod
    def empty(
        cls,
        fields: Mapping[str, Field],
        n_rows: int,
        device: torch.device,
        *,
        pinned: bool = False,
        lengths: Mapping[str, np.ndarray] = MappingProxyType({}),
    ) -> "Rows":
        """Memory for `n_rows` rows, page-locked if `pinned`.

        lengths: {ragged field: (n_rows,) number of values in each row}. Without lengths, call `make_room` later.
        """
        columns: dict[str, Tensor | Ragged] = {}
        for name, field in fields.items():
            if field.is_ragged:
                host_offsets = np.zeros(n_rows + 1, OFFSET_DTYPE)
                np.cumsum(lengths.get(name, host_offsets[1:]), out=host_offsets[1:])
                offsets = _empty((n_rows + 1,), OFFSET_DTYPE, device, pinned).copy_(torch.from_numpy(host_offsets))
                host_offsets = offsets.numpy() if device.type == "cpu" else host_offsets
                values = _empty((int(host_offsets[-1]), *field.shape), field.dtype, device, pinned)
                columns[name] = Ragged(values, offsets, host_offsets)
            elif field.is_channels_last:
                channels, height, width = field.shape
                shape = (n_rows, height, width, channels)
                columns[name] = _empty(shape, field.dtype, device, pinned).permute(0, 3, 1, 2)
            else:
                columns[name] = _empty((n_rows, *field.shape), field.dtype, device, pinned)
        return cls(columns)

    def make_room(self, name: str, n_values: int, *, pinned: bool = False) -> bool:
        """Give a ragged column of a pool new memory if `n_values` values do not fit.

        Returns whether the memory is new. Raises UserError if 32-bit offsets cannot count the values.
        """
        column = self.columns[name]
        assert isinstance(column, Ragged)
        if n_values <= len(column.values):
            return False
        if n_values > MAX_VALUES:
            raise UserError(f"a pool has {n_values:,} values of {name}, too many to count; use fewer data.pool_batches")
        # 1.25: the next pool may have more values.
        shape = (min(int(1.25 * n_values), MAX_VALUES), *column.values.shape[1:])
        dtype = column.values[:0].cpu().numpy().dtype
        self.columns[name] = replace(column, values=_empty(shape, dtype, column.device, pinned))
        return True

    def __getitem__(self, name: str) -> Any:
        return self.columns[name]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    @property
    def device(self) -> torch.device:
        return next(iter(self.columns.values())).device

    def slice(self, start: int, stop: int) -> "Rows":
        """Rows start to stop - 1 as views: nothing is copied."""
        return Rows({name: column[start:stop] for name, column in self.columns.items()})

    def batches(self, batch_size: int) -> Iterator["Rows"]:
        """Views of `batch_size` rows each; the last view may have fewer."""
        return (self.slice(start, start + batch_size) for start in range(0, len(self), batch_size))

    def take(self, index: Tensor, out: "Rows | None" = None) -> "Rows":
        """A copy of the rows at `index`, (n,) int64. out: rows to overwrite with the copy.

        index: on the device of the rows, or in host memory, which ragged columns require.
        """
        taken: dict[str, Tensor | Ragged] = {}
        index_on_device = to_device(index, self.device)
        for name, column in self.columns.items():
            if isinstance(column, Ragged):
                taken[name] = column.take(index.numpy(), out[name].values if out else None)
            else:
                taken[name] = _take(column, index_on_device, out[name][: len(index)] if out else None)
        return Rows(taken)

    def to(self, device: torch.device) -> "Rows":
        """A copy on a device. The copy shares the offsets in host memory."""
        return Rows({name: column.to(device) for name, column in self.columns.items()})

    def copy_(self, other: "Rows", non_blocking: bool = False) -> None:
        """Overwrite with the same number of rows."""
        for name, column in self.columns.items():
            column.copy_(other[name], non_blocking=non_blocking)

    def numpy(self) -> dict[str, np.ndarray | RaggedArray]:
        """The same memory as NumPy arrays: {field: array or RaggedArray}. Host only."""
        return {name: column.numpy() for name, column in self.columns.items()}


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device without waiting for it: unpinned host memory is pinned first."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _take(column: Tensor, index: Tensor, target: Tensor | None) -> Tensor:
    """Copy the rows at `index`, and keep their memory format."""
    if signed := SIGNED.get(column.dtype):
        target = None if target is None else target.view(signed)
        return _take(column.view(signed), index, target).view(column.dtype)
    if column.ndim == 4 and column.stride(1) == 1:  # channels last
        target_NHWC = None if target is None else target.permute(0, 2, 3, 1)
        return torch.index_select(column.permute(0, 2, 3, 1), 0, index, out=target_NHWC).permute(0, 3, 1, 2)
    return torch.index_select(column, 0, index, out=target)


def _empty(shape: tuple[int, ...], dtype: np.dtype, device: torch.device, pinned: bool) -> Tensor:
    # NumPy asks for huge pages and torch does not: the memory is filled 7 % faster.
    if device.type == "cpu" and not pinned:
        return torch.from_numpy(np.empty(shape, dtype))
    torch_dtype = torch.from_numpy(np.empty(0, dtype)).dtype
    return torch.empty(shape, dtype=torch_dtype, device=device, pin_memory=pinned)
