"""What a source of rows is, and what is asked of it."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from fastgpu.rows.field import Field
from fastgpu.rows.rows import Rows


class Read(NamedTuple):
    """Rows first, first + 1, ... of a block go to `places` of the pool."""

    block: int
    first: int
    places: np.ndarray


class PoolPlan(NamedTuple):
    """One pool of one rank: what to read, and where in the pool it goes."""

    epoch: int
    number: int
    """Of the pool in the epoch, from 0."""
    rows: int
    real_rows: int
    """Rows that are no padding; the padding, if any, lies at the pool's end."""
    skip_rows: int
    """Rows at the pool's start that were trained on before the run was resumed."""
    consumed: int
    """Fresh rows that all ranks together have taken in this epoch once this pool is done."""
    is_last: bool
    reads: list[Read]


class Source(Protocol):
    """Rows to be read in blocks: a `Store` of files, or `DatasetRows`."""

    name: str
    fields: dict[str, Field]
    attributes: dict[str, Any]
    block_rows: np.ndarray
    lengths: Mapping[str, np.ndarray] = MappingProxyType({})
    """{ragged field: (rows,) int32, the number of values of each row}"""
    in_workers: bool = False
    """Whether worker processes read them, one row a block, maybe drawn anew in each epoch."""

    def __len__(self) -> int: ...

    @property
    def row_bytes(self) -> int:
        """Of all fields, of ragged ones in the mean."""
        return sum(field.row_bytes for field in self.fields.values())

    def column(self, name: str) -> np.ndarray:
        """One small field of all rows, (rows, *shape); raises KeyError if it is not at hand."""


class Pool(NamedTuple):
    """Rows of one rank on the device, in training order; valid until the next pool is asked for."""

    plan: PoolPlan
    rows: Rows
