"""The order of training: which row comes when, computed from (seed, epoch) with memory for each block, not each row.

    rows of an epoch, blocks shuffled  | 7 | 2 | 9 | 0 | 4 | 1 | 8 | 3 | 6 | 5 |    cut into equal parts, each of
    canonical ranks                    |   rank 0    |   rank 1    |  rank 2   |    them into runs of rows, which
    pools                              | p0 | p1 |p2 | p0 | p1 |p2 | ...            are shuffled

A global batch takes equally many rows from every canonical rank, and each real rank owns neighbouring ones. So the
global batches are the same, rows in the same order, for every world size that divides the number of canonical ranks.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from torch.utils.data import DistributedSampler

from fastgpu.rows.contract import Dataset, PoolPlan, Reads
from fastgpu.rows.runs import Runs
from fastgpu.rows.selection import EpochRows, Mixture, Share


class Shard(NamedTuple):
    """Which part of each global batch a rank trains on."""

    rank: int = 0
    world_size: int = 1
    canonical_ranks: int | None = None
    """A multiple of world_size that divides the global batch. None: world_size."""


class EpochOrder(NamedTuple):
    """The rows of an epoch, block after block, in the order in which the blocks were shuffled."""

    rows: EpochRows
    order: np.ndarray
    """(runs,) the numbers of the runs of `rows`, in this order."""
    ends: np.ndarray
    """(runs,) where each of these runs ends: the number of rows up to there."""

    def cut(self, start: int, stop: int) -> tuple[np.ndarray, Runs]:
        """Rows `start` to `stop` - 1 of this order, one or more: the numbers of their runs, and these runs."""
        first, last = np.searchsorted(self.ends, [start, stop - 1], "right")
        numbers, ends = self.order[first : last + 1], self.ends[first : last + 1]
        runs = self.rows.runs.take(numbers)

        # Of the first and of the last run, only a part may be asked for.
        begins = ends - runs.counts
        cut_begins, cut_ends = np.maximum(begins, start), np.minimum(ends, stop)
        return numbers, Runs(runs.starts + cut_begins - begins, cut_ends - cut_begins)


class BlockSampler(DistributedSampler):
    """Shuffles blocks of rows, and rows within pools of batches, so that each block is read once and as a whole.

    It is a DistributedSampler, and can take its place in a torch DataLoader.
    """

    def __init__(
        self,
        rows: Dataset | np.ndarray | Share | Mixture,
        batch_size: int,
        shard: Shard = Shard(),  # noqa: B008 (an immutable tuple)
        pool_batches: int = 1,
        *,
        seed: int | None = 0,
        drop_last: bool | None = None,
    ):
        """rows: a Dataset; or (blocks,) rows of each block; or a selection of them. batch_size: rows of one batch on
        this rank. pool_batches: batches that are shuffled together. seed: None keeps the order of the file.

        drop_last: leave out the rows at the end of each canonical rank that do not fill a batch, other rows in each
        epoch. False: pad canonical ranks to equal length with copies of their last row. None: leave out if shuffled.
        Raises ValueError if the numbers do not fit together.
        """
        if drop_last is None:
            drop_last = seed is not None
        if isinstance(rows, Dataset):
            rows = rows.block_rows if rows.selection is None else rows.selection
        self.selection = Share(rows) if isinstance(rows, np.ndarray) else rows
        n_rows = self.selection.rows_per_epoch
        super().__init__(range(n_rows), shard.world_size, shard.rank, seed is not None, seed or 0, drop_last)  # type: ignore[arg-type]
        self.shard = shard
        self.n_rows = n_rows
        self.batch_size = batch_size
        self.pool_batches = pool_batches
        self.canonical_ranks = shard.canonical_ranks or shard.world_size
        self.global_batch_size = batch_size * shard.world_size
        if self.canonical_ranks % shard.world_size or self.global_batch_size % self.canonical_ranks:
            numbers = f"{self.global_batch_size} rows, {self.canonical_ranks} canonical ranks, {shard.world_size} ranks"
            raise ValueError(f"a global batch should divide among canonical ranks, and these among ranks: {numbers}")
        # Rows of a batch from each canonical rank.
        self._rows_each = self.global_batch_size // self.canonical_ranks
        if drop_last:
            self._canonical_rows = n_rows // self.canonical_ranks // self._rows_each * self._rows_each
        else:
            self._canonical_rows = -(-n_rows // self.canonical_ranks)
        self.num_samples = self._canonical_rows * (self.canonical_ranks // shard.world_size)  # as torch calls them
        self.total_size = self._canonical_rows * self.canonical_ranks
        self.pools_per_epoch = -(-self._canonical_rows // (pool_batches * self._rows_each))
        self.max_pool_rows = min(pool_batches * batch_size, self.num_samples)

    @property
    def fingerprint(self) -> dict[str, int]:
        """The numbers that decide which row comes when, under the names that checkpoints use."""
        return {
            "rows": self.n_rows,
            "selection": self.selection.checksum,
            "global_rows": self.global_batch_size,
            "pool_batches": self.pool_batches,
            "canonical_ranks": self.canonical_ranks,
            "seed": self.seed,
        }

    def batches_in(self, number: int) -> int:
        """The number of batches of a pool. The last pool may have fewer, and its last batch may be short."""
        return min(self.pool_batches, -(-self._canonical_rows // self._rows_each) - number * self.pool_batches)

    def __iter__(self) -> Iterator[int]:
        """Row numbers of this rank in order, for torch's DataLoader. `set_epoch` selects the epoch."""
        for plan in self.pools(self.epoch):
            yield from plan.row_ids.tolist()

    def pools(self, epoch: int, first_pool: int = 0) -> Iterator[PoolPlan]:
        """The pools of an epoch, beginning with pool `first_pool`."""
        rows = self.selection.in_epoch(epoch)
        order = rows.order(self._rng(epoch) if self.shuffle else None)
        # Summed up in place: there may be ten million blocks.
        ends = rows.runs.counts[order].astype(np.int64)
        np.cumsum(ends, out=ends)
        for number in range(first_pool, self.pools_per_epoch):
            yield self._plan(epoch, number, EpochOrder(rows, order, ends))

    def _plan(self, epoch: int, number: int, in_order: EpochOrder) -> PoolPlan:
        """Plan one pool of this rank.

        Example with two canonical ranks a and b on this rank, batches of 4 rows (2 of each canonical rank) and 3
        batches in a pool, the last of which has one row of each only. Unshuffled, the places of the pool hold

            batch 0         batch 1         batch 2
            a0 a1 b0 b1  |  a2 a3 b2 b3  |  a4 b4

        Shuffling permutes the places of each canonical rank among themselves, so every batch keeps its share of each.
        """
        rows_each = self._rows_each
        n_ranks = self.canonical_ranks // self.num_replicas  # canonical ranks of this rank
        begin = number * self.pool_batches * rows_each  # first row of the pool, counted within each canonical rank
        n_each = min(self.pool_batches * rows_each, self._canonical_rows - begin)  # rows of each, padding included

        # The places in all batches but the last, which may be short: its places are given out one by one.
        n_batches = (n_each - 1) // rows_each
        places_in_batches = np.arange(n_batches * n_ranks * rows_each).reshape(n_batches, n_ranks, rows_each)
        next_place = places_in_batches.size

        parts: list[tuple[int, np.ndarray]] = []  # first row in the order of the epoch, places
        padding: list[int] = []
        for n in range(n_ranks):
            rank = self.rank * n_ranks + n
            start = rank * self.n_rows // self.canonical_ranks + begin
            stop = min(start + n_each, (rank + 1) * self.n_rows // self.canonical_ranks)
            n_last = stop - start - n_batches * rows_each  # rows in the last batch
            places = np.append(places_in_batches[:, n], np.arange(next_place, next_place + n_last))
            next_place += n_last
            if self.shuffle:
                places = self._rng(epoch, rank, number).permutation(places)
            if len(places):
                parts.append((start, places))
            if len(places) < n_each:  # repeat the last row
                padding.append(max(stop - 1, 0))
        parts += [(row, np.array([place])) for place, row in enumerate(padding, next_place)]

        numbers, runs = zip(*[in_order.cut(start, start + len(places)) for start, places in parts], strict=True)
        reads = Reads(Runs.join(runs), np.concatenate([places for _, places in parts]))
        n_rows = n_each * n_ranks
        repeats = np.broadcast_to(np.int64(0), n_rows)  # takes no memory
        if in_order.rows.repeats is not None:
            repeats = np.empty(n_rows, np.int64)
            repeats[reads.places] = np.repeat(in_order.rows.repeats[np.concatenate(numbers)], reads.runs.counts)
        return PoolPlan(
            seed=self.seed,
            epoch=epoch,
            number=number,
            n_rows=n_rows,
            n_real_rows=next_place,
            is_last=number == self.pools_per_epoch - 1,
            is_shuffled=self.shuffle,
            reads=reads,
            repeats=repeats,
        )

    def _rng(self, epoch: int, *part: int) -> np.random.Generator:
        """`spawn_key` keeps the streams of an epoch apart: (0, 0) and (0, 0, 0, 0) are the same seed to NumPy."""
        return np.random.default_rng(np.random.SeedSequence((self.seed, epoch), spawn_key=part))
