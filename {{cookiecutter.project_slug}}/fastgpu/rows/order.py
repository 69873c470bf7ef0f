"""Deterministic order of the rows, computed from (seed, epoch). Its memory grows with the number of blocks, not rows.

    blocks, shuffled    | 7 | 2 | 9 | 0 | 4 | 1 | 8 | 3 | 6 | 5 |    their rows are cut into
    canonical ranks     |   rank 0    |   rank 1    |  rank 2   |    equal parts, these into pools,
    pools               | p0 | p1 |p2 | p0 | p1 |p2 | ...            and each pool is shuffled

A global batch takes the same number of rows from every canonical rank, and each real rank owns neighbouring canonical
ranks. So every world size that divides the number of canonical ranks sees the same global batches, with the rows in the
same order.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from torch.utils.data import DistributedSampler

from fastgpu.rows.contract import Dataset, PoolPlan, Reads
from fastgpu.rows.selection import EpochRows, Selection, Subset


class Shard(NamedTuple):
    """The part of each global batch that a rank trains on."""

    rank: int = 0
    world_size: int = 1
    canonical_ranks: int | None = None
    """A multiple of world_size that divides the global batch. None: world_size."""


class BlockSampler(DistributedSampler):
    """Shuffles blocks of rows, then rows within pools of batches, so blocks are read as a whole.

    It can replace a DistributedSampler in a torch DataLoader.
    """

    def __init__(
        self,
        source: Dataset | np.ndarray | Selection,
        batch_size: int,
        shard: Shard = Shard(),  # noqa: B008 (an immutable tuple)
        pool_batches: int = 1,
        *,
        seed: int | None = 0,
        drop_last: bool | None = None,
    ):
        """source: a Dataset; or the number of rows of each block, (blocks,); or a selection. batch_size: rows of a
        batch on this rank. pool_batches: batches that are shuffled together. seed: None keeps the order of the file.

        drop_last: True leaves out the rows at the end of each canonical rank that do not fill a batch, which are other
        rows in each epoch. False pads canonical ranks to equal length with copies of their last row. None: True if
        shuffled. Raises ValueError if the numbers do not fit together.
        """
        if isinstance(source, Dataset):
            source = source.block_rows if source.selection is None else source.selection
        self.selection = Subset(source) if isinstance(source, np.ndarray) else source
        self.n_rows = n_rows = self.selection.rows_per_epoch
        super().__init__(
            range(n_rows),  # type: ignore[arg-type]
            num_replicas=shard.world_size,
            rank=shard.rank,
            shuffle=seed is not None,
            seed=seed or 0,
            drop_last=seed is not None if drop_last is None else drop_last,
        )
        self.shard = shard
        self.batch_size = batch_size
        self.pool_batches = pool_batches
        self.global_batch_size = batch_size * shard.world_size
        self.canonical_ranks = shard.canonical_ranks or shard.world_size
        if self.canonical_ranks % shard.world_size or self.global_batch_size % self.canonical_ranks:
            raise ValueError(
                f"a global batch should divide among canonical ranks, and these among ranks: {self.global_batch_size} "
                f"rows, {self.canonical_ranks} canonical ranks, {shard.world_size} ranks"
            )
        self._rows_each = self.global_batch_size // self.canonical_ranks
        self._canonical_rows = -(-n_rows // self.canonical_ranks)
        if self.drop_last:
            self._canonical_rows = n_rows // self.canonical_ranks // self._rows_each * self._rows_each
        # torch's names for these two numbers.
        self.num_samples = self._canonical_rows * (self.canonical_ranks // shard.world_size)
        self.total_size = self._canonical_rows * self.canonical_ranks
        self.pools_per_epoch = -(-self._canonical_rows // (pool_batches * self._rows_each))
        self.max_pool_rows = min(pool_batches * batch_size, self.num_samples)

    @property
    def fingerprint(self) -> dict[str, int]:
        """Identifies the order of the rows: the numbers that decide it, named as in checkpoints."""
        return {
            "rows": self.n_rows,
            "selection": self.selection.fingerprint,
            "global_rows": self.global_batch_size,
            "pool_batches": self.pool_batches,
            "canonical_ranks": self.canonical_ranks,
            "seed": self.seed,
        }

    def batches_in(self, number: int) -> int:
        """The number of batches of a pool. The last pool may have fewer batches, and a short last batch."""
        n_batches = -(-self._canonical_rows // self._rows_each)
        return min(self.pool_batches, n_batches - number * self.pool_batches)

    def __iter__(self) -> Iterator[int]:
        """Row numbers of this rank, for torch's DataLoader. `set_epoch` selects the epoch."""
        for plan in self.pools(self.epoch):
            yield from plan.row_ids.tolist()

    def pools(self, epoch: int, first_pool: int = 0) -> Iterator[PoolPlan]:
        """The pools of an epoch, beginning with pool `first_pool`."""
        rows = self.selection.in_epoch(epoch, self._rng(epoch) if self.shuffle else None)
        for number in range(first_pool, self.pools_per_epoch):
            yield self._plan(epoch, number, rows)

    def _plan(self, epoch: int, number: int, rows: EpochRows) -> PoolPlan:
        n_ranks = self.canonical_ranks // self.num_replicas
        ranks = self.rank * n_ranks + np.arange(n_ranks)

        # Each canonical rank has rows `starts` to `stops` - 1 of the epoch.
        begin = number * self.pool_batches * self._rows_each
        n_padded = min(self.pool_batches * self._rows_each, self._canonical_rows - begin)
        starts = ranks * self.n_rows // self.canonical_ranks + begin
        stops = np.minimum(starts + n_padded, (ranks + 1) * self.n_rows // self.canonical_ranks)
        n_rows, n_real_rows = n_ranks * n_padded, int((stops - starts).sum())

        # Each canonical rank shuffles only its own places, so every batch keeps its number of rows of each rank.
        places = _interleave(stops - starts, self._rows_each)
        if self.shuffle:
            rngs = [self._rng(epoch, rank, number) for rank in ranks.tolist()]
            places = [rng.permutation(each) for rng, each in zip(rngs, places, strict=True)]

        # Padding at the end of the pool: canonical ranks that lack a row repeat their last row.
        last_rows = np.maximum(stops[stops - starts < n_padded] - 1, 0)
        places.append(np.arange(n_real_rows, n_rows))
        numbers, runs = rows.cut(np.append(starts, last_rows), np.append(stops, last_rows + 1))
        reads = Reads(runs, np.concatenate(places))

        # Only mixtures repeat rows. Without a mixture, the zeros take no memory.
        repeats = np.broadcast_to(np.int64(0), n_rows)
        if rows.repeats is not None:
            repeats = np.empty(n_rows, np.int64)
            repeats[reads.places] = np.repeat(rows.repeats[numbers], runs.counts)
        return PoolPlan(
            reads, repeats, n_real_rows, seed=self.seed, epoch=epoch, number=number, is_shuffled=self.shuffle
        )

    def _rng(self, epoch: int, *part: int) -> np.random.Generator:
        """The generator of one part. `spawn_key` is needed: to NumPy, the seeds (0, 0) and (0, 0, 0, 0) are equal."""
        return np.random.default_rng(np.random.SeedSequence((self.seed, epoch), spawn_key=part))


def _interleave(n_rows: np.ndarray, rows_each: int) -> list[np.ndarray]:
    """The places of the rows of each canonical rank in a pool: every batch has `rows_each` rows of each rank.

    n_rows: (canonical ranks,) number of rows of each, which differ by at most one. Example: a pool with 5 rows of rank
    a and 5 rows of rank b, 2 of each in a batch, is

        batch 0         batch 1         batch 2, which is short
        a0 a1 b0 b1  |  a2 a3 b2 b3  |  a4 b4
    """
    n_ranks, n_batches = len(n_rows), int(n_rows.min()) // rows_each
    n_places = n_batches * n_ranks * rows_each
    in_whole_batches = np.arange(n_places).reshape(n_batches, n_ranks, rows_each)
    rest = n_rows - n_batches * rows_each
    in_last_batch = np.split(n_places + np.arange(rest.sum()), np.cumsum(rest)[:-1])
    return [np.append(in_whole_batches[:, rank], in_last_batch[rank]) for rank in range(n_ranks)]
