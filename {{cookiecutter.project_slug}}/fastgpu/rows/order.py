"""Which row is trained on when: a pure function of (seed, epoch) that needs memory for the blocks only.

    blocks of the file, permuted   | 7 | 2 | 9 | 0 | 4 | 1 | 8 | 3 | 6 | 5 |    one line of rows, cut into
    canonical ranks                |   rank 0    |   rank 1    |  rank 2   |    equal parts, each of them cut into
    pools                          | p0 | p1 |p2 | p0 | p1 |p2 | ...            runs of rows that are shuffled

A global batch takes equally many rows from every canonical rank, and each real rank owns neighbouring canonical ranks.
So the global batches are the same, rows in the same order, for every world size that divides the number of canonical
ranks.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import DistributedSampler

from fastgpu.rows.contract import BlockRead, PoolPlan


def echo_passes(factor: float, number: int) -> int:
    """How many times to train on pool `number`, counted over the whole run: 2.5 gives 2, 3, 2, 3, ...

    The difference of two floors of number x factor is exact in the mean and needs no state in a checkpoint.
    """
    milli = round(1000 * factor)
    return (number + 1) * milli // 1000 - number * milli // 1000


class Shard(NamedTuple):
    """The part of the rows that one rank trains on."""

    rank: int = 0
    world_size: int = 1
    canonical_ranks: int | None = None
    """A multiple of world_size that divides the global batch. None: world_size."""


class _Line:
    """Blocks that lie one after the other: finds the block that holds a row of the line, and where the block begins.

    Only the start of every 1,024th block is stored and the others are summed on demand: 10^7 blocks need 80 kB instead
    of 80 MB.
    """

    STEP = 1024

    def __init__(self, block_rows: np.ndarray, blocks: np.ndarray | None = None):
        """blocks: the block at each slot of the line. None: the order of the file."""
        self._block_rows = block_rows
        self._blocks = blocks
        is_even = blocks is None and len(block_rows) > 0 and bool((block_rows[:-1] == block_rows[0]).all())
        self._rows_each = int(block_rows[0]) if is_even else None  # of all slots but the last, if they are equal
        part = self.STEP * self.STEP  # summed in parts, so that no array is as long as the line
        sums = []
        for start in range(0, len(block_rows), part):
            rows = self._rows(start, start + part)
            sums.append(np.add.reduceat(rows, np.arange(0, len(rows), self.STEP), dtype=np.int64))
        self._marks = np.concatenate([[0], np.cumsum(np.concatenate(sums))])

    def blocks(self, start: int, stop: int) -> np.ndarray:
        """(stop - start,): the block at each of these slots."""
        return np.arange(start, stop) if self._blocks is None else self._blocks[start:stop]

    def start(self, slot: int) -> int:
        """The first row of a slot."""
        mark = slot // self.STEP
        return int(self._marks[mark]) + int(self._rows(mark * self.STEP, slot).sum())

    def starts(self, slots: np.ndarray) -> np.ndarray:
        """(n,) int64: the first row of each of these slots, (n,) in any order."""
        if self._rows_each is not None:
            return slots.astype(np.int64) * self._rows_each
        marks, places = np.divmod(slots, self.STEP)
        starts = self._marks[marks]
        by_mark = np.argsort(marks, kind="stable")
        for part in np.split(by_mark, np.flatnonzero(np.diff(marks[by_mark])) + 1):
            mark = int(marks[part[0]])
            rows = self._rows(mark * self.STEP, (mark + 1) * self.STEP)
            starts[part] += (np.cumsum(rows) - rows)[places[part]]
        return starts

    def slot(self, row: int) -> int:
        """The slot that holds a row."""
        mark = int(np.searchsorted(self._marks, row, "right")) - 1
        ends = self._marks[mark] + np.cumsum(self._rows(mark * self.STEP, (mark + 1) * self.STEP))
        return mark * self.STEP + int(np.searchsorted(ends, row, "right"))

    def _rows(self, start: int, stop: int) -> np.ndarray:
        if self._blocks is None:
            return self._block_rows[start:stop]
        return self._block_rows[self._blocks[start:stop]]


class BlockSampler(DistributedSampler):
    """Plans an epoch in an order that a disk can follow. A drop-in for torch's DistributedSampler.

    block_rows: (blocks,) rows of each block. batch_size: rows of one batch on this rank. pool_batches: batches that are
    shuffled together. seed: None keeps the order of the file. drop_last: leave out the rows at the end of each
    canonical rank that do not fill a batch (other rows in each epoch); if False, canonical ranks are padded to equal
    length by repeating their last row. Raises ValueError if the numbers do not fit together.
    """

    def __init__(
        self,
        block_rows: np.ndarray,
        batch_size: int,
        *,
        shard: Shard = Shard(),  # noqa: B008 (an immutable tuple)
        pool_batches: int = 1,
        seed: int | None = 0,
        drop_last: bool = True,
    ):
        n_rows = int(np.sum(block_rows))
        rows = range(n_rows)
        super().__init__(rows, shard.world_size, shard.rank, seed is not None, seed or 0, drop_last)  # type: ignore[arg-type]
        self.n_rows = n_rows
        self.batch_size = batch_size
        self.pool_batches = pool_batches
        self.canonical_ranks = shard.canonical_ranks or shard.world_size
        self.global_batch_size = batch_size * shard.world_size
        if self.canonical_ranks % shard.world_size:
            raise ValueError(f"{self.canonical_ranks} canonical ranks do not divide among {shard.world_size} ranks")
        if self.global_batch_size % self.canonical_ranks:
            raise ValueError(
                f"a global batch of {self.global_batch_size} rows does not divide among {self.canonical_ranks} "
                "canonical ranks"
            )
        self._block_rows = np.asarray(block_rows, np.int32)
        self._file = _Line(self._block_rows)
        self._share = self.global_batch_size // self.canonical_ranks  # rows of a batch from one canonical rank
        if drop_last:
            rank_rows = n_rows // self.canonical_ranks
            self.n_batches = rank_rows // self._share
        else:
            rank_rows = -(-n_rows // self.canonical_ranks)
            self.n_batches = -(-rank_rows // self._share)
        self._canonical_rows = min(rank_rows, self.n_batches * self._share)
        self.num_samples = self._canonical_rows * (self.canonical_ranks // shard.world_size)
        self.total_size = self._canonical_rows * self.canonical_ranks

    def __len__(self) -> int:
        return self.num_samples

    @property
    def shard(self) -> Shard:
        return Shard(self.rank, self.num_replicas, self.canonical_ranks)

    @property
    def pools_per_epoch(self) -> int:
        return -(-self.n_batches // self.pool_batches)

    @property
    def max_pool_rows(self) -> int:
        """Number of rows in the largest pool of this rank."""
        return min(self.pool_batches * self.batch_size, self.num_samples)

    @property
    def identity(self) -> dict[str, int]:
        """The numbers that decide which row comes when, under the names that checkpoints use."""
        return {
            "rows": self.n_rows,
            "blocks": len(self._block_rows),
            "global_rows": self.global_batch_size,
            "pool_batches": self.pool_batches,
            "lanes": self.canonical_ranks,
            "seed": self.seed,
        }

    def __iter__(self) -> Iterator[int]:
        """Row numbers of this rank in order, for torch's DataLoader. `set_epoch` selects the epoch."""
        for plan in self.pools(self.epoch):
            yield from self.row_ids(plan).tolist()

    def max_values(self, lengths: np.ndarray) -> int:
        """An upper bound on the values in a pool of this rank, where row n has lengths[n] values: (rows,).

        The smaller of two bounds: the sum of the n longest rows, where n is the size of a pool; and the values in the
        densest blocks, where the two blocks that a pool may cut in each canonical rank count in full.
        """
        n_rows = self.max_pool_rows
        longest = np.partition(lengths, len(lengths) - min(n_rows, len(lengths)))[-n_rows:].sum(dtype=np.int64)
        starts = np.cumsum(self._block_rows, dtype=np.int64) - self._block_rows
        values = np.add.reduceat(lengths, starts, dtype=np.int64)
        fullest = np.argsort(-values / self._block_rows, kind="stable")
        cut_rows = 2 * self.canonical_ranks // self.num_replicas * int(self._block_rows.max())
        ends = np.cumsum(self._block_rows[fullest], dtype=np.int64)
        full = values[fullest][: int(np.searchsorted(ends, n_rows + cut_rows)) + 1].sum()
        padding = 0 if self.drop_last else self.canonical_ranks // self.num_replicas * int(lengths.max())
        return int(min(longest, full)) + padding

    def row_ids(self, plan: PoolPlan) -> np.ndarray:
        """(rows,) int64: the row of the source at each place of the pool."""
        blocks, firsts, places = zip(*plan.reads, strict=True)
        row_ids = np.empty(plan.n_rows, np.int64)
        starts = self._starts(np.array(blocks)) + np.array(firsts)
        row_ids[np.concatenate(places)] = runs(starts, np.array([*map(len, places)]))
        return row_ids

    def _starts(self, blocks: np.ndarray) -> np.ndarray:
        """(n,) int64: the first row of each of these blocks."""
        return self._file.starts(blocks)

    def pools(self, epoch: int, consumed: int = 0) -> Iterator[PoolPlan]:
        """The pools of an epoch, beginning with the one that `consumed` rows (of all ranks together) lead to."""
        if consumed % self.global_batch_size:
            raise ValueError(
                f"{consumed} consumed rows are not a multiple of the global batch size {self.global_batch_size}"
            )
        line = self._line(epoch)
        start_batch = consumed // self.global_batch_size
        for number in range(start_batch // self.pool_batches, self.pools_per_epoch):
            yield self._plan(epoch, number, line, start_batch)

    def _line(self, epoch: int) -> Any:
        """The rows of an epoch one after the other, in the form that `_reads` takes."""
        if not self.shuffle:
            return self._file
        blocks = np.arange(len(self._block_rows), dtype=np.int32)
        self._rng(epoch).shuffle(blocks)
        return _Line(self._block_rows, blocks)

    def _plan(self, epoch: int, number: int, line: Any, start_batch: int) -> PoolPlan:
        """Plan one pool of this rank.

        Example with two canonical ranks a and b on this rank, batches of 4 rows (2 of each canonical rank) and 3
        batches in a pool, the last of which has one row of each only. Unshuffled, the places of the pool hold

            batch 0         batch 1         batch 2
            a0 a1 b0 b1  |  a2 a3 b2 b3  |  a4 b4

        Shuffling permutes the places of each canonical rank among themselves, so every batch keeps its share of each.
        """
        share = self._share
        first_batch = number * self.pool_batches
        per_rank = self.canonical_ranks // self.num_replicas
        begin = first_batch * share  # first and last row of the pool, counted within each canonical rank
        stop = min((first_batch + self.pool_batches) * share, self._canonical_rows)
        full = (stop - begin - 1) // share * share  # rows before the last batch of the pool, which may be short
        spans = []  # (canonical rank, its first row on the line, its last row + 1) without padding
        for rank in range(self.rank * per_rank, (self.rank + 1) * per_rank):
            rank_start = rank * self.n_rows // self.canonical_ranks
            rank_stop = (rank + 1) * self.n_rows // self.canonical_ranks
            spans.append((rank, rank_start + begin, min(rank_start + stop, rank_stop)))
        n_rows = (stop - begin) * per_rank
        n_real_rows = sum(hi - lo for _, lo, hi in spans)
        reads: list[BlockRead] = []
        next_tail = full * per_rank  # next free place of the last batch
        next_padding = n_real_rows  # next free place of the padding
        for slot, (rank, lo, hi) in enumerate(spans):
            turn = np.arange(hi - lo)  # place of each row among the rows of its canonical rank
            places = turn + turn // share * (self.batch_size - share) + slot * share
            n_tail = len(places[full:])
            places[full:] = next_tail + np.arange(n_tail)
            next_tail += n_tail
            if self.shuffle:
                places = self._rng(epoch, rank, number).permutation(places)
            reads += self._reads(lo, places, line)
            if hi - lo < stop - begin:
                reads += self._reads(max(hi - 1, 0), np.array([next_padding]), line)
                next_padding += 1
        return PoolPlan(
            epoch=epoch,
            number=number,
            n_rows=n_rows,
            n_real_rows=n_real_rows,
            n_skipped_rows=max(0, start_batch - first_batch) * self.batch_size,
            consumed=min((first_batch + self.pool_batches) * self.global_batch_size, self.total_size),
            is_last=stop == self._canonical_rows,
            reads=reads,
        )

    def _rng(self, epoch: int, *part: int) -> np.random.Generator:
        """A generator for the blocks of an epoch, or for one part of it.

        `spawn_key` keeps the streams apart. Plain tuples would not: (0, 0) and (0, 0, 0, 0) are the same seed to NumPy,
        and the permutation of a pool put blocks of one row back into the order of the file.
        """
        return np.random.default_rng(np.random.SeedSequence((self.seed, epoch), spawn_key=part))

    def _reads(self, start: int, places: np.ndarray, line: Any) -> Iterator[BlockRead]:
        """Cut the rows start, start + 1, ... of the line at the borders of the blocks."""
        if not len(places):
            return
        slot = line.slot(start)
        first = start - line.start(slot)  # only the first block may begin in its middle
        blocks = line.blocks(slot, line.slot(start + len(places) - 1) + 1)
        begin = 0
        for block, end in zip(blocks.tolist(), (np.cumsum(self._block_rows[blocks]) - first).tolist(), strict=True):
            yield BlockRead(block, first, places[begin:end])
            begin = end
            first = 0


def runs(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """(sum of counts,) int64: starts[0], starts[0] + 1, ... for counts[0] numbers, then those from starts[1] on."""
    before = np.cumsum(counts, dtype=np.int64) - counts
    return np.repeat(starts - before, counts) + np.arange(int(counts.sum()))
