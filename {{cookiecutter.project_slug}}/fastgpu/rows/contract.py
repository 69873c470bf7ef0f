"""What the rooms agree on: a source of rows, a plan of a pool, a read of a block.

A source has rows in blocks, which are cheap to read as a whole. A `BlockSampler` (order.py) plans pools: which rows of
which blocks go to which places of a pool. The feed carries the plans out.
"""

from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from fastgpu.rows.rows import Field, Rows

if TYPE_CHECKING:
    from fastgpu.rows.order import BlockSampler
    from fastgpu.rows.selection import Mixture


class BlockRead(NamedTuple):
    """Neighbouring rows of one block, and the place of each in a pool."""

    block: int
    first: int
    """The first row to read, counted from the beginning of the block."""
    places: np.ndarray
    """(n,) int64, all different: row `first + i` of the block goes to place `places[i]` of the pool."""


class PoolPlan(NamedTuple):
    """One pool of one rank: the rows to read and where they go."""

    epoch: int
    number: int
    """Number of the pool in its epoch, from 0."""
    n_rows: int
    """Rows of the pool, padding included."""
    n_real_rows: int
    """Rows without padding. Padding, if there is any, lies at the end of the pool."""
    n_skipped_rows: int
    """Rows at the beginning of the pool that were trained on before the run was resumed."""
    consumed: int
    """Fresh rows that all ranks together have taken from this epoch once the pool is done."""
    is_last: bool
    """Whether this is the last pool of its epoch."""
    reads: list[BlockRead]


class Pool(NamedTuple):
    """Rows of one rank on the device, in training order. They are valid until the next pool is asked for."""

    plan: PoolPlan
    rows: Rows


class PoolReader(Protocol):
    """Plans the pools of one rank and reads their rows."""

    n_threads: int
    """Number of threads that may call `read` at the same time."""
    rows_per_job: int | None
    """Rows that a thread reads at a time. None: as many as are worth waking it."""

    def pools(self, epoch: int, consumed: int = 0) -> Iterator[PoolPlan]:
        """The pools of an epoch, beginning with the one that `consumed` rows (of all ranks together) lead to."""

    def read(self, reads: Iterable[BlockRead], out: Mapping[str, Any]) -> None:
        """Read rows to their places in `out` (see `Source.read`)."""

    def close(self) -> None:
        """End the threads or processes of the reader."""


class Source(Protocol):
    """Rows in blocks: HDF5 files, arrays, image files, or a torch Dataset."""

    name: str
    """Name for messages."""
    fields: dict[str, Field]
    attributes: dict[str, Any]
    """What the source says about its rows, such as `class_names`, `mean` and `std`."""
    block_rows: np.ndarray
    """(blocks,) int32: number of rows in each block."""
    lengths: Mapping[str, np.ndarray] = MappingProxyType({})
    """{ragged field: (rows,) int32, number of values in each row}."""
    filters: str = ""
    """How the rows are compressed in their file, such as `gzip`. Empty: they are not."""
    mixture: "Mixture | None" = None
    """How often rows are trained on in each epoch. None: each row once."""
    by_h5py: bool = False
    """Whether only the HDF5 library can read the rows, one thread at a time."""
    around_page_cache: bool = False
    """Whether rows are read from the disk in each epoch, because the memory could not keep them."""
    decoding: str = ""
    """How encoded rows are decoded while they are read, in words. Empty: they are not encoded."""

    def __len__(self) -> int: ...

    @property
    def row_bytes(self) -> int:
        """Bytes of one row over all fields; the mean for ragged fields."""
        return sum(field.row_bytes for field in self.fields.values())

    @property
    def identity(self) -> dict[str, object]:
        """What tells these rows from others, as far as it is cheap to know. All ranks must have the same."""
        return {"the number of rows": len(self)} | {f"field {name}": field for name, field in self.fields.items()}

    @property
    def stored(self) -> "Source":
        """The rows that may be kept in memory: other ones than these, if each epoch makes new rows of them."""
        return self

    def over(self, stored: "Source") -> "Source":
        """These rows, read from a copy of `stored` in memory."""
        return stored

    def through_page_cache(self) -> "Source":
        """The same rows, of which those that are read again come from memory: for measurements."""
        return self

    def column(self, name: str) -> np.ndarray:
        """One small field of all rows, (rows, *shape). Raises KeyError if it is not in memory."""
        raise KeyError(name)

    def in_memory(self, name: str) -> np.ndarray | None:
        """One small field of all rows, (rows, *shape). None if there is no such field, or it is not in memory."""
        try:
            return self.column(name)
        except KeyError:
            return None

    def read(self, reads: Iterable[BlockRead], out: Mapping[str, Any]) -> None:
        """Copy the rows of each read to their places. Thread-safe.

        out: {field: C-contiguous array (rows, *shape)}. For a ragged field it is a RaggedArray, whose offsets say where
        the values of each place go. Raises OSError or RankError if the bytes cannot be had.
        """

    def find_in_memory(self, reads: Iterable[BlockRead], n_rows: int) -> np.ndarray | None:
        """(n_rows,) int64: the row at each place, if `gather` can copy the rows of these reads. None: `read` has to."""
        return None

    def gather(self, row_ids: np.ndarray, out: Mapping[str, np.ndarray]) -> None:
        """Copy rows that were found in memory to `out`, in the order of `row_ids`, (n,). Thread-safe.

        out: {field: C-contiguous array (n, *shape)}. Raises RankError if the file was changed meanwhile.
        """
        raise AssertionError(f"{self.name} finds no rows in memory")

    def open_reader(self, order: "BlockSampler", n_readers: int) -> PoolReader:
        """A reader of this source in that order. n_readers: number of threads or worker processes."""
        return BlockReader(self, order, n_readers)


class DerivedSource(Source):
    """Rows that are made of those of another source, in the same files."""

    def __init__(self, name: str, source: Source):
        self.name = name
        self.attributes = source.attributes
        self.filters = source.filters
        self.by_h5py = source.by_h5py
        self.around_page_cache = source.around_page_cache
        self._source = source

    @property
    def identity(self) -> dict[str, object]:
        """That of the other source, with the number and the types of these rows."""
        return self._source.identity | super().identity

    def through_page_cache(self) -> Source:
        """See `Source.through_page_cache`."""
        return self._of(self._source.through_page_cache())

    def _of(self, source: Source) -> Source:
        """The same rows, made of those of an equal source."""
        other = copy(self)
        other._source = source
        return other


class BlockReader:
    """Reads blocks of a source by threads, in the order of a sampler."""

    rows_per_job: int | None = None

    def __init__(self, source: Source, order: "BlockSampler", n_threads: int):
        self.n_threads = n_threads
        self.pools = order.pools
        self.read = source.read

    def close(self) -> None:
        """Nothing to end: the threads belong to the caller."""
