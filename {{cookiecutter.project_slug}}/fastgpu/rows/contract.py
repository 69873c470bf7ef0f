"""What the rooms agree on: a source of rows, a plan of a pool, a read of a block.

A source has rows in blocks, which are cheap to read as a whole. A `BlockSampler` (order.py) plans pools: which rows of
which blocks go to which places of a pool. The feed carries the plans out.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastgpu.rows.rows import Field, RaggedArray, Rows, runs
from fastgpu.rows.selection import Mixture, Share

if TYPE_CHECKING:
    from fastgpu.rows.order import BlockSampler


class Reads(NamedTuple):
    """Runs of neighbouring rows of one block, one run after the other, and the place of each row in a pool."""

    starts: np.ndarray
    """(runs,) int64: the first row of each run."""
    counts: np.ndarray
    """(runs,) int64: the number of rows of each run."""
    places: np.ndarray
    """(rows,) int64, all different: the place of each row."""

    def portions(self, n_rows: int) -> Iterator["Reads"]:
        """The same reads in portions of about `n_rows` rows; no run is cut."""
        ends = np.cumsum(self.counts)
        cuts = np.flatnonzero(np.diff((ends - self.counts) // n_rows)) + 1
        places = np.split(self.places, ends[cuts - 1])
        return map(Reads, np.split(self.starts, cuts), np.split(self.counts, cuts), places)

    def ranges(self) -> Iterator[tuple[int, np.ndarray]]:
        """(first row, places of this row and those that follow it) of each run."""
        done = 0
        for start, count in zip(self.starts.tolist(), self.counts.tolist(), strict=True):
            yield start, self.places[done : done + count]
            done += count


class PoolPlan(NamedTuple):
    """One pool of one rank: the rows to read and where they go."""

    epoch: int
    number: int
    """Number of the pool in its epoch, from 0."""
    n_rows: int
    """Rows of the pool, padding included."""
    n_real_rows: int
    """Rows without padding. Padding, if there is any, lies at the end of the pool."""
    is_last: bool
    """Whether this is the last pool of its epoch."""
    reads: Reads
    order: "BlockSampler"
    """The sampler that planned it. Its seed and the epoch decide what is drawn for the rows, if it shuffles at all."""

    @property
    def row_ids(self) -> np.ndarray:
        """(n_rows,) int64: the row at each place of the pool."""
        row_ids = np.empty(self.n_rows, np.int64)
        row_ids[self.reads.places] = runs(self.reads.starts, self.reads.counts)
        return row_ids


Out = np.ndarray | RaggedArray | list[tuple[np.ndarray, RaggedArray]]
"""Where the rows of a field go: (rows, *shape), C-contiguous or channels-last; a RaggedArray, whose offsets say where
the values of each place go; or, where nobody knows these before, a list that takes (places, rows)."""


class Pool(NamedTuple):
    """Rows of one rank on the device, in training order. They are valid until the next pool is asked for."""

    plan: PoolPlan
    rows: Rows


class Dataset:
    """Rows in blocks: HDF5 files, arrays, image files, or a torch Dataset.

    A kind of rows has a name, fields, attributes, block_rows and read; and lengths, digest and column as far as it
    knows them. The rest follows.
    """

    name: str
    fields: dict[str, Field]
    attributes: dict[str, Any]
    """What the source says about its rows, such as `class_names`, `mean` and `std`."""
    block_rows: np.ndarray
    """(blocks,) int32: number of rows in each block."""
    lengths: Mapping[str, np.ndarray] = MappingProxyType({})
    """{ragged field: (rows,) int32, number of values in each row}, where that is known before they are read."""
    selection: Share | Mixture | None = None
    """The rows of each epoch. None: each row once. Row numbers are those of all rows."""
    decoding: str = ""
    """How encoded rows are decoded while they are read, in words. Empty: they are not encoded."""

    def __len__(self) -> int:
        """Number of rows that may be in an epoch."""
        return len(self.selection) if self.selection else int(self.block_rows.sum())

    @property
    def digest(self) -> str:
        """A digest of the content, as far as it is cheap to know. Empty: nothing is known."""
        return ""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row over all fields; the mean for ragged fields."""
        return sum(field.row_bytes for field in self.fields.values())

    def column(self, name: str) -> np.ndarray | None:
        """One field of all rows, selected or not: (rows, *shape). None if it is not in memory."""
        return None

    def read(self, plan: PoolPlan, reads: Reads, out: Mapping[str, Out]) -> None:
        """Copy the rows of each read to their places. Thread-safe.

        plan: of the pool that the reads belong to. out: {field: where its rows go, see `Out`}. Raises OSError or
        RankError if the bytes cannot be had.
        """
        raise NotImplementedError

    def close(self) -> None:
        """End the processes that read, if there are any."""
