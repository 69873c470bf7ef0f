"""Which row is trained on when: a pure function of (seed, epoch), in O(blocks) memory.

    blocks of the file, permuted   | 7 | 2 | 9 | 0 | 4 | 1 | 8 | 3 | 6 | 5 |    one line of rows, cut into
    lanes                          |    lane 0   |    lane 1   |   lane 2  |    equal lanes, and each lane into
    pools                          | p0 | p1 |p2 | p0 | p1 |p2 | ...            runs that are shuffled in themselves

A global batch takes the same number of rows from every lane, and a rank owns lanes / world_size neighbouring lanes. So
the global batches are the same, rows in the same order, for every world size that divides `lanes`.
"""

from collections.abc import Iterator

import numpy as np
from torch.utils.data import DistributedSampler

from fastgpu.rows.contract import PoolPlan, Read


class _Line:
    """Blocks one after the other: which one holds row n of the line, and where does it begin?

    Only the start of each 1,024th is kept, the others are summed when asked for: 10^7 blocks cost 80 kB, not 80 MB.
    """

    STEP = 1024

    def __init__(self, block_rows: np.ndarray, blocks: np.ndarray | None = None):
        """blocks: the block at each slot of the line; None: they lie in their own order."""
        self._block_rows, self._blocks = block_rows, blocks
        part, sums = self.STEP * self.STEP, []  # a part at a time: no array as long as the line
        for start in range(0, len(block_rows), part):
            rows = self._rows(start, start + part)
            sums.append(np.add.reduceat(rows, np.arange(0, len(rows), self.STEP), dtype=np.int64))
        self._marks = np.concatenate([[0], np.cumsum(np.concatenate(sums))])

    def block(self, slot: int) -> int:
        return slot if self._blocks is None else int(self._blocks[slot])

    def start(self, slot: int) -> int:
        """First row of a slot."""
        mark = slot // self.STEP
        return int(self._marks[mark]) + int(self._rows(mark * self.STEP, slot).sum())

    def slot(self, row: int) -> int:
        """The slot that holds a row."""
        mark = int(np.searchsorted(self._marks, row, "right")) - 1
        ends = self._marks[mark] + np.cumsum(self._rows(mark * self.STEP, (mark + 1) * self.STEP))
        return mark * self.STEP + int(np.searchsorted(ends, row, "right"))

    def _rows(self, start: int, stop: int) -> np.ndarray:
        return self._block_rows[slice(start, stop) if self._blocks is None else self._blocks[start:stop]]


class BlockSampler(DistributedSampler):
    """Rows in an order that a disk can follow; a drop-in for torch's DistributedSampler that can also plan reads.

    block_rows: (blocks,) rows of each block. batch_rows: rows of a batch on this rank. lanes: a multiple of world_size
    that divides the global batch. pool_batches: batches shuffled together. With drop_last, the end of each lane that
    fills no batch is left out (other rows each epoch); without, lanes are padded to equal length with their last row.
    Raises ValueError if the numbers do not fit.
    """

    def __init__(
        self,
        block_rows: np.ndarray,
        batch_rows: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        lanes: int | None = None,
        pool_batches: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
    ):
        rows = int(np.sum(block_rows))
        super().__init__(range(rows), world_size, rank, shuffle, seed, drop_last)  # type: ignore[arg-type]
        self.lanes = lanes or world_size
        self.global_rows = batch_rows * world_size
        if self.lanes % world_size:
            raise ValueError(f"{self.lanes} lanes do not divide among {world_size} ranks")
        if self.global_rows % self.lanes:
            raise ValueError(f"a global batch of {self.global_rows} rows does not divide among {self.lanes} lanes")
        self.rows, self.batch_rows, self.pool_batches = rows, batch_rows, pool_batches
        self._block_rows = np.asarray(block_rows, np.int32)
        self._file = _Line(self._block_rows)
        self._share = self.global_rows // self.lanes  # rows of a global batch from one lane
        lane_rows = rows // self.lanes if drop_last else -(-rows // self.lanes)
        self.batches = lane_rows // self._share if drop_last else -(-lane_rows // self._share)
        self._lane_rows = min(lane_rows, self.batches * self._share)
        self.num_samples = self._lane_rows * (self.lanes // world_size)  # torch's name: rows of this rank an epoch
        self.total_size = self._lane_rows * self.lanes

    def __len__(self) -> int:
        return self.num_samples

    @property
    def pools_an_epoch(self) -> int:
        return -(-self.batches // self.pool_batches)

    @property
    def identity(self) -> dict[str, int]:
        """The numbers that decide which row comes when."""
        return {
            "rows": self.rows,
            "blocks": len(self._block_rows),
            "global_rows": self.global_rows,
            "pool_batches": self.pool_batches,
            "lanes": self.lanes,
            "seed": self.seed,
        }

    def __iter__(self) -> Iterator[int]:
        """Row numbers of this rank in order, for torch's DataLoader; `set_epoch` chooses the epoch."""
        for plan in self.pools(self.epoch):
            yield from self.row_numbers(plan).tolist()

    def most_values(self, lengths: np.ndarray) -> int:
        """No pool of this rank has more values than this, where row n has lengths[n] of them: (rows,).

        The lesser of two bounds: of as many rows as a pool has, the longest; and of blocks, the fullest, in each lane
        with the two that its pool may cut counted whole.
        """
        pool_rows = min(self.pool_batches * self.batch_rows, self.num_samples)
        longest = np.partition(lengths, len(lengths) - min(pool_rows, len(lengths)))[-pool_rows:].sum(dtype=np.int64)
        starts = np.cumsum(self._block_rows, dtype=np.int64) - self._block_rows
        values = np.add.reduceat(lengths, starts, dtype=np.int64)
        fullest = np.argsort(-values / self._block_rows, kind="stable")
        cut = 2 * self.lanes // self.num_replicas * int(self._block_rows.max())
        ends = np.cumsum(self._block_rows[fullest], dtype=np.int64)
        full = values[fullest][: int(np.searchsorted(ends, pool_rows + cut)) + 1].sum()
        padding = 0 if self.drop_last else self.lanes // self.num_replicas * int(lengths.max())
        return int(min(longest, full)) + padding

    def row_numbers(self, plan: PoolPlan) -> np.ndarray:
        """(rows,) int64: which row of the store lies at each place of the pool."""
        numbers = np.empty(plan.rows, np.int64)
        for block, first, places in plan.reads:
            start = self._file.start(block) + first
            numbers[places] = np.arange(start, start + len(places))
        return numbers

    def pools(self, epoch: int, consumed: int = 0) -> Iterator[PoolPlan]:
        """The pools of an epoch, from the one on that `consumed` rows (all ranks together) lead to."""
        if consumed % self.global_rows:
            raise ValueError(f"{consumed} consumed rows are no whole number of global batches of {self.global_rows}")
        line = self._file
        if self.shuffle:
            blocks = np.arange(len(self._block_rows), dtype=np.int32)
            self._rng(epoch).shuffle(blocks)
            line = _Line(self._block_rows, blocks)
        start_batch = consumed // self.global_rows
        for number in range(start_batch // self.pool_batches, self.pools_an_epoch):
            yield self._plan(epoch, number, line, start_batch)

    def _plan(self, epoch: int, number: int, line: _Line, start_batch: int) -> PoolPlan:
        share, first_batch = self._share, number * self.pool_batches
        per_rank = self.lanes // self.num_replicas
        begin = first_batch * share  # of the pool in each lane
        stop = min((first_batch + self.pool_batches) * share, self._lane_rows)
        full = (stop - begin - 1) // share * share  # rows of a lane before the pool's last batch, which may be short
        spans = []  # of each of our lanes: its own rows on the line, then whether one row of padding follows
        for lane in range(self.rank * per_rank, (self.rank + 1) * per_rank):
            lane_start, lane_stop = lane * self.rows // self.lanes, (lane + 1) * self.rows // self.lanes
            spans.append((lane, lane_start + begin, min(lane_start + stop, lane_stop)))
        rows, real_rows = (stop - begin) * per_rank, sum(hi - lo for _, lo, hi in spans)
        reads: list[Read] = []
        tail, pad = full * per_rank, real_rows  # next free places: of the last batch's real rows, of the padding
        for slot, (lane, lo, hi) in enumerate(spans):
            turn = np.arange(hi - lo)  # of the lane's rows: the batch that each is in takes `share` of every lane
            places = turn + turn // share * (self.batch_rows - share) + slot * share
            places[full:] = tail + np.arange(len(places[full:]))
            tail += len(places[full:])
            if self.shuffle:
                places = self._rng(epoch, lane, number).permutation(places)
            reads += self._reads(lo, places, line)
            if hi - lo < stop - begin:
                reads += self._reads(max(hi - 1, 0), np.array([pad]), line)
                pad += 1
        done = min((first_batch + self.pool_batches) * self.global_rows, self.total_size)
        skip = max(0, start_batch - first_batch) * self.batch_rows
        return PoolPlan(epoch, number, rows, real_rows, skip, done, stop == self._lane_rows, reads)

    def _rng(self, epoch: int, *part: int) -> np.random.Generator:
        """Of its own for the epoch's blocks and for each part: bare tuples would not do, (0, 0) and (0, 0, 0, 0) are
        one seed to NumPy, and blocks of one row were put back into file order by the pool's permutation."""
        return np.random.default_rng(np.random.SeedSequence((self.seed, epoch), spawn_key=part))

    def _reads(self, start: int, places: np.ndarray, line: _Line) -> Iterator[Read]:
        """Cut the line's rows start, start + 1, ... at the borders of the blocks."""
        slot, at = line.slot(start), 0
        first = start - line.start(slot)  # only the first block may begin in its middle
        while at < len(places):
            block = line.block(slot)
            count = min(len(places) - at, int(self._block_rows[block]) - first)
            yield Read(block, first, places[at : at + count])
            slot, at, first = slot + 1, at + count, 0
