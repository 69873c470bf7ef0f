"""Rows: columns of equal length that are moved, sliced and gathered together.

A column is a tensor (rows, ...), or `Ragged`: rows with any number of values each, such as the items of a user.

Shapes: B rows, N values of all rows together.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastgpu.process.launch import UserError

CODECS = {0xFF: "jpeg", 0x89: "png", 0x52: "webp"}
"""First byte of an encoded image -> its format."""
LONG_ROW_BYTES = 4096
"""Ragged rows of this size in the mean are copied one by one, shorter ones by one indexed copy."""
OFFSET_DTYPE = np.dtype(np.int32)
"""Type of the offsets of ragged rows on the device: torch's embedding_bag wants the type of the values."""
MAX_VALUES = np.iinfo(OFFSET_DTYPE).max
"""Maximum number of ragged values that lie together on a device."""


class Field(NamedTuple):
    """The type of one field: `dtype` and `shape` of one row, or of one value if it is ragged: rows have any number."""

    dtype: np.dtype
    shape: tuple[int, ...]
    mean_values: float | None = None
    """Mean number of values in a row, if the field is ragged; None if it is not."""
    n_items: int | None = None
    """If the values are item numbers: the number of items. Each value is in range(n_items)."""
    codec: str = ""
    """If the values of a row are the bytes of an image file: the formats of these files, such as jpeg or jpeg+png."""
    is_channels_last: bool = False
    """Whether rows of `shape` (C, H, W) lie in memory as (H, W, C): decoders make and convolutions take them so."""

    @property
    def is_ragged(self) -> bool:
        return self.mean_values is not None

    def __str__(self) -> str:
        """Rows of fields that read alike may lie in one pool."""
        if self.codec:
            return "encoded images of any size (N)"
        dimensions = ["N", *["any number"] * self.is_ragged, *map(str, self.shape)]
        return f"{self.dtype} ({', '.join(dimensions)})" + (f" below {self.n_items}" if self.n_items else "")

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; the mean over the source if the field is ragged."""
        n_bytes = self.dtype.itemsize * prod(self.shape)
        return n_bytes if self.mean_values is None else OFFSET_DTYPE.itemsize + ceil(self.mean_values * n_bytes)


def runs(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """(sum of counts,) int64: starts[0], starts[0] + 1, ... for counts[0] numbers, then those from starts[1] on."""
    before = np.cumsum(counts, dtype=np.int64) - counts
    numbers = np.repeat(starts - before, counts)
    numbers += np.arange(len(numbers))
    return numbers


class RaggedArray(NamedTuple):
    """Rows with any number of values each, in host memory: row b is values[offsets[b] : offsets[b + 1]]."""

    values: np.ndarray
    """(N or more, *shape)"""
    offsets: np.ndarray
    """(B + 1,) int32 or int64, beginning with 0."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def places(self, rows: np.ndarray) -> np.ndarray:
        """(n,) int64: the indices of the values of `rows`, one row after the other."""
        starts = self.offsets[rows].astype(np.int64)
        return runs(starts, self.offsets[rows + 1] - starts)


@dataclass(frozen=True)
class Ragged:
    """Rows with any number of values each, on a device: row b is values[offsets[b] : offsets[b + 1]].

    A copy of the offsets stays in host memory, so that the host never has to ask the device for a size.
    """

    values: Tensor
    """(N or more, *shape)"""
    offsets: Tensor
    """(B + 1,) int32, beginning with 0, as torch's embedding_bag takes them (include_last_offset)."""
    host_offsets: np.ndarray
    """(B + 1,) int32: the same numbers in host memory."""

    @property
    def device(self) -> torch.device:
        return self.values.device

    def __len__(self) -> int:
        return len(self.host_offsets) - 1

    def __getitem__(self, rows: slice) -> "Ragged":
        """Neighbouring rows. The values are a view; the offsets begin with 0 again."""
        start, stop, _ = rows.indices(len(self))
        lo = int(self.host_offsets[start])
        hi = int(self.host_offsets[stop])
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
        """A copy of the rows at `index`, (n,) in host memory. Their values are written to `out` if that is given."""
        starts = self.host_offsets[index]
        counts = self.host_offsets[index + 1] - starts
        host_offsets = np.zeros(len(index) + 1, OFFSET_DTYPE)
        np.cumsum(counts, out=host_offsets[1:])
        moves = to_device(torch.from_numpy(np.stack([starts - host_offsets[:-1], counts])), self.device)
        n_values = int(host_offsets[-1])
        places = torch.arange(n_values, dtype=torch.int32, device=self.device)
        places += moves[0].repeat_interleave(moves[1], output_size=n_values)
        values = torch.index_select(self.values, 0, places, out=None if out is None else out[:n_values])
        return Ragged(values, to_device(torch.from_numpy(host_offsets), self.device), host_offsets)

    def to(self, device: torch.device) -> "Ragged":
        return Ragged(self.values.to(device), self.offsets.to(device), self.host_offsets)

    def copy_(self, other: "Ragged", non_blocking: bool = False) -> None:
        """Overwrite with equally many values. `host_offsets` must hold their offsets already."""
        self.values.copy_(other.values, non_blocking=non_blocking)
        self.offsets.copy_(other.offsets, non_blocking=non_blocking)

    def numpy(self) -> RaggedArray:
        """The same memory as a RaggedArray (host only)."""
        return RaggedArray(self.values.numpy(), self.host_offsets)


@dataclass(frozen=True)
class Rows:
    """Columns of equal length; `rows["images"]` is one of them."""

    columns: dict[str, Tensor | Ragged]
    """{field: (rows, ...), or Ragged}"""

    @classmethod
    def empty(
        cls,
        fields: Mapping[str, Field],
        n_rows: int,
        device: torch.device,
        *,
        pinned: bool = False,
        n_values: Mapping[str, int] | None = None,
    ) -> "Rows":
        """Memory for `n_rows` rows, page-locked if `pinned`.

        n_values: {ragged field: values of all rows together}. Without it, `make_room` has to be called.
        """
        columns: dict[str, Tensor | Ragged] = {}
        for name, field in fields.items():
            if field.is_ragged:
                values = _empty(((n_values or {}).get(name, 0), *field.shape), field.dtype, device, pinned)
                offsets = _empty((n_rows + 1,), OFFSET_DTYPE, device, pinned).zero_()
                host_offsets = offsets.numpy() if device.type == "cpu" else np.zeros(n_rows + 1, OFFSET_DTYPE)
                columns[name] = Ragged(values, offsets, host_offsets)
            elif field.is_channels_last:
                channels, height, width = field.shape
                shape = (n_rows, height, width, channels)
                columns[name] = _empty(shape, field.dtype, device, pinned).permute(0, 3, 1, 2)
            else:
                columns[name] = _empty((n_rows, *field.shape), field.dtype, device, pinned)
        return cls(columns)

    def make_room(self, name: str, n_values: int, *, pinned: bool = False) -> bool:
        """Give a ragged column of a pool new memory for so many values if they do not fit. Returns whether it did.

        Raises UserError if 32-bit offsets cannot count them.
        """
        column = self.columns[name]
        assert isinstance(column, Ragged)
        if n_values <= len(column.values):
            return False
        if n_values > MAX_VALUES:
            raise UserError(f"a pool has {n_values:,} values of {name}, too many to count; use fewer data.pool_batches")
        shape = (min(int(1.25 * n_values), MAX_VALUES), *column.values.shape[1:])  # the next pool may have more
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
        """Views of `batch_size` rows each; the last may have fewer."""
        return (self.slice(start, start + batch_size) for start in range(0, len(self), batch_size))

    def take(self, index: Tensor, out: "Rows | None" = None) -> "Rows":
        """A copy of the rows at `index`, (n,) int64. It is written to the memory of `out` if that is given.

        index: on the device of the rows or in host memory; in host memory if there is a ragged column.
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
        """The same rows on a device. Offsets in host memory are shared with these."""
        return Rows({name: column.to(device) for name, column in self.columns.items()})

    def copy_(self, other: "Rows", non_blocking: bool = False) -> None:
        """Overwrite with equally many rows."""
        for name, column in self.columns.items():
            column.copy_(other[name], non_blocking=non_blocking)

    def numpy(self) -> dict[str, np.ndarray | RaggedArray]:
        """The same memory as {field: array or RaggedArray} (host only)."""
        return {name: column.numpy() for name, column in self.columns.items()}


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device. The host does not wait until it is there: it would for memory that is not page-locked."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _take(column: Tensor, index: Tensor, target: Tensor | None) -> Tensor:
    """index_select of rows, which are copied as they lie in memory."""
    if column.ndim == 4 and column.stride(1) == 1:  # channels last
        target_NHWC = None if target is None else target.permute(0, 2, 3, 1)
        return torch.index_select(column.permute(0, 2, 3, 1), 0, index, out=target_NHWC).permute(0, 3, 1, 2)
    return torch.index_select(column, 0, index, out=target)


def _empty(shape: tuple[int, ...], dtype: np.dtype, device: torch.device, pinned: bool) -> Tensor:
    if device.type == "cpu" and not pinned:  # NumPy asks for huge pages and torch does not: 7 % faster to fill
        return torch.from_numpy(np.empty(shape, dtype))
    torch_dtype = torch.from_numpy(np.empty(0, dtype)).dtype
    return torch.empty(shape, dtype=torch_dtype, device=device, pin_memory=pinned)
