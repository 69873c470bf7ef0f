"""Which row is trained on when: a pure function of (seed, epoch) that needs memory for the blocks only.

    extents of an epoch, permuted  | 7 | 2 | 9 | 0 | 4 | 1 | 8 | 3 | 6 | 5 |    one line of rows, cut into
    canonical ranks                |   rank 0    |   rank 1    |  rank 2   |    equal parts, each of them cut into
    pools                          | p0 | p1 |p2 | p0 | p1 |p2 | ...            runs of rows that are shuffled

An extent is a run of neighbouring rows of one block: all of it, unless a selection (selection.py) says otherwise. A
global batch takes equally many rows from every canonical rank, and each real rank owns neighbouring ones. So the global
batches are the same, rows in the same order, for every world size that divides the number of canonical ranks.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from torch.utils.data import DistributedSampler

from fastgpu.rows.contract import Dataset, PoolPlan, Reads
from fastgpu.rows.selection import Extents, Mixture, Share


class Shard(NamedTuple):
    """The part of the rows that one rank trains on."""

    rank: int = 0
    world_size: int = 1
    canonical_ranks: int | None = None
    """A multiple of world_size that divides the global batch. None: world_size."""


class Line(NamedTuple):
    """The rows of an epoch: extents in an order of their own, one after the other."""

    extents: Extents
    order: np.ndarray
    """(extents,) their numbers."""
    ends: np.ndarray
    """(extents,) where each ends on the line."""

    def cut(self, start: int, places: np.ndarray) -> Reads:
        """The rows start, start + 1, ... of the line, which go to these places."""
        if not len(places):
            return Reads(places, places, places)
        stop = start + len(places)
        first, last = np.searchsorted(self.ends, [start, stop - 1], "right")
        numbers = self.order[first : last + 1]
        starts = self.extents.starts[numbers].astype(np.int64)
        counts = self.extents.counts[numbers].astype(np.int64)
        n_before = start + counts[0] - self.ends[first]  # the first and the last extent may be in this pool in part
        counts[-1] -= self.ends[last] - stop
        starts[0] += n_before
        counts[0] -= n_before
        return Reads(starts, counts, places)


class BlockSampler(DistributedSampler):
    """Plans an epoch in an order that a disk can follow. A drop-in for torch's DistributedSampler.

    rows: a Dataset; or (blocks,) rows of each block; or a selection of them. batch_size: rows of one batch on this
    rank. pool_batches: batches that are shuffled together. seed: None keeps the order of the file. drop_last: leave
    out the rows at the end of each canonical rank that do not fill a batch (other rows in each epoch); if False,
    canonical ranks are padded to equal length by repeating their last row; None: if they are shuffled. Raises
    ValueError if the numbers do not fit together.
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
        if drop_last is None:
            drop_last = seed is not None
        if isinstance(rows, Dataset):
            rows = rows.block_rows if rows.selection is None else rows.selection
        self.selection = Share(rows) if isinstance(rows, np.ndarray) else rows
        n_rows = self.selection.epoch_rows
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
        self._share = self.global_batch_size // self.canonical_ranks  # rows of a batch from one canonical rank
        if drop_last:
            self._canonical_rows = n_rows // self.canonical_ranks // self._share * self._share
        else:
            self._canonical_rows = -(-n_rows // self.canonical_ranks)
        self.num_samples = self._canonical_rows * (self.canonical_ranks // shard.world_size)  # as torch calls them
        self.total_size = self._canonical_rows * self.canonical_ranks
        self.pools_per_epoch = -(-self._canonical_rows // (pool_batches * self._share))
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
        """Batches of that pool of an epoch: the last pool may have fewer, the last of which may be short."""
        return min(self.pool_batches, -(-self._canonical_rows // self._share) - number * self.pool_batches)

    def __iter__(self) -> Iterator[int]:
        """Row numbers of this rank in order, for torch's DataLoader. `set_epoch` selects the epoch."""
        for plan in self.pools(self.epoch):
            yield from plan.row_ids.tolist()

    def pools(self, epoch: int, first_pool: int = 0) -> Iterator[PoolPlan]:
        """The pools of an epoch, beginning with pool `first_pool`."""
        extents = self.selection.extents(epoch)
        units = np.arange(extents.n_units, dtype=np.int32)
        if self.shuffle:
            self._rng(epoch).shuffle(units)
        order = extents.of_units(units)
        ends = extents.counts[order].astype(np.int64)
        line = Line(extents, order, np.cumsum(ends, out=ends))  # in place: there may be ten million blocks
        for number in range(first_pool, self.pools_per_epoch):
            yield self._plan(epoch, number, line)

    def _plan(self, epoch: int, number: int, line: Line) -> PoolPlan:
        """Plan one pool of this rank. line: the rows of the epoch.

        Example with two canonical ranks a and b on this rank, batches of 4 rows (2 of each canonical rank) and 3
        batches in a pool, the last of which has one row of each only. Unshuffled, the places of the pool hold

            batch 0         batch 1         batch 2
            a0 a1 b0 b1  |  a2 a3 b2 b3  |  a4 b4

        Shuffling permutes the places of each canonical rank among themselves, so every batch keeps its share of each.
        """
        share = self._share
        per_rank = self.canonical_ranks // self.num_replicas
        ranks = np.arange(self.rank * per_rank, (self.rank + 1) * per_rank)
        begin = number * self.pool_batches * share  # first row of the pool, counted within each canonical rank
        n_each = min(self.pool_batches * share, self._canonical_rows - begin)  # rows of each canonical rank, padded
        starts = ranks * self.n_rows // self.canonical_ranks + begin  # on the line
        n_real = np.minimum(n_each, (ranks + 1) * self.n_rows // self.canonical_ranks - starts)
        n_full = (n_each - 1) // share  # batches before the last one, which may be short
        slots = np.arange(per_rank, dtype=np.uint16)  # the canonical ranks of this rank
        slot_of_place = np.concatenate([np.tile(slots.repeat(share), n_full), slots.repeat(n_real - n_full * share)])
        places_of_slots = np.split(np.argsort(slot_of_place, kind="stable"), np.cumsum(n_real)[:-1])
        next_padding = n_real_rows = len(slot_of_place)  # next free place of the padding
        reads: list[Reads] = []
        for rank, start, in_order in zip(ranks.tolist(), starts.tolist(), places_of_slots, strict=True):
            places = self._rng(epoch, rank, number).permutation(in_order) if self.shuffle else in_order
            reads.append(line.cut(start, places))
            if len(places) < n_each:
                reads.append(line.cut(max(start + len(places) - 1, 0), np.array([next_padding])))
                next_padding += 1
        return PoolPlan(
            seed=self.seed,
            epoch=epoch,
            number=number,
            n_rows=n_each * per_rank,
            n_real_rows=n_real_rows,
            is_last=number == self.pools_per_epoch - 1,
            is_shuffled=self.shuffle,
            reads=Reads(*map(np.concatenate, zip(*reads, strict=True))),
        )

    def _rng(self, epoch: int, *part: int) -> np.random.Generator:
        """`spawn_key` keeps the streams of an epoch apart: (0, 0) and (0, 0, 0, 0) are the same seed to NumPy."""
        return np.random.default_rng(np.random.SeedSequence((self.seed, epoch), spawn_key=part))
