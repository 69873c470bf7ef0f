"""A part of the rows, held out for validation; and epochs in which some rows come more often than others.

Such a mixture has sources at given weights, or classes in equal numbers. Each group of rows (a source or a class) gets
a share of the epoch, its turns. If it has fewer rows than turns, its rows come several times; if it has more, each
epoch takes the next ones:

    rows of a group, in a random order     | 4 | 0 | 5 | 2 | 1 | 3 |      6 rows, 8 turns in each epoch
    epoch 0, each row once, then 2 more      x   x
    epoch 1, each row once, then 2 more              x   x

So the rows of a group are used equally often, up to one turn, over any number of epochs.
"""

import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from fastgpu.process.launch import UserError
from fastgpu.rows.contract import BlockRead, DerivedSource, Source
from fastgpu.rows.order import BlockSampler, runs


class Mixture(NamedTuple):
    """Groups of rows, and the weight of each group in an epoch."""

    names: tuple[str, ...]
    """Name of each group, for messages."""
    weights: tuple[float, ...]
    """Weight of each group, in any unit."""
    groups: np.ndarray
    """(rows,) whole numbers: the group of each row. Each group has rows."""
    by_block: bool
    """Whether all rows of a block are in one group. Blocks are then used as a whole, so that reads stay long."""

    def turns(self, n_rows: int) -> np.ndarray:
        """(groups,) int64: the rows of each group in an epoch of `n_rows` rows (largest remainders)."""
        weights = np.asarray(self.weights, np.float64)
        exact = n_rows * weights / weights.sum()
        turns = np.floor(exact).astype(np.int64)
        largest_first = np.argsort(turns - exact, kind="stable")
        turns[largest_first[: n_rows - turns.sum()]] += 1
        return turns


class MixedSampler(BlockSampler):
    """A `BlockSampler` whose epoch has the turns of a `Mixture`.

    An epoch has as many rows as the source, rounded down to whole global batches, so that no turn is left out. Like the
    plain order, it is a function of (seed, epoch) and the same for every world size that divides the canonical ranks.
    It needs memory for each row: 4 bytes always, 4 more during an epoch, and about 60 while one is planned (twice as
    much from 2^31 rows on).
    """

    def __init__(self, mixture: Mixture, block_rows: np.ndarray, batch_size: int, **options: Any):
        """options: those of BlockSampler except drop_last."""
        super().__init__(block_rows, batch_size, **options)
        self._block_start = np.cumsum(self._block_rows, dtype=np.int64) - self._block_rows
        self._group_rows = np.bincount(mixture.groups, minlength=len(mixture.names))
        self._rows = self._order_rows(mixture)  # group after group
        self.n_rows = self.total_size
        self.turns = mixture.turns(self.n_rows)
        self._checksum = zlib.crc32(self.turns.tobytes(), zlib.crc32(mixture.groups.tobytes()))

    def _order_rows(self, mixture: Mixture) -> np.ndarray:
        """(rows,): the rows of each group in the order in which epochs take them: whole blocks, or single rows."""
        dtype = np.int32 if len(mixture.groups) <= np.iinfo(np.int32).max else np.int64
        unit_start = self._block_start if mixture.by_block else np.arange(len(mixture.groups), dtype=dtype)
        units = self._rng(0, 0).permutation(len(unit_start))
        units = units[np.argsort(mixture.groups[unit_start[units]], kind="stable")]
        if not mixture.by_block:
            return units.astype(dtype)
        return runs(self._block_start[units], self._block_rows[units]).astype(dtype)

    @property
    def identity(self) -> dict[str, int]:
        """As for BlockSampler, with a checksum of the groups and their turns."""
        return super().identity | {"mixture": self._checksum}

    def uses(self, epoch: int) -> np.ndarray:
        """(rows,) whole numbers: how often each row is used in an epoch."""
        passes, extra = np.divmod(self.turns, self._group_rows)
        uses = np.zeros(len(self._rows), np.min_scalar_type(int(passes.max()) + 1))
        start = 0
        for n_rows, n_passes, n_extra in zip(self._group_rows.tolist(), passes.tolist(), extra.tolist(), strict=True):
            rows = self._rows[start : start + n_rows]
            uses[rows] = n_passes
            first = epoch * n_extra % n_rows
            uses[rows[first : first + n_extra]] += 1
            uses[rows[: max(0, first + n_extra - n_rows)]] += 1
            start += n_rows
        return uses

    def max_values(self, lengths: np.ndarray) -> int:
        """An upper bound on the values in a pool of this rank: those of the longest rows, as often as they may come."""
        max_uses = np.repeat(-(-self.turns // self._group_rows), self._group_rows)
        return int(np.sort(np.repeat(lengths[self._rows], max_uses))[-self.max_pool_rows :].sum(dtype=np.int64))

    def _starts(self, blocks: np.ndarray) -> np.ndarray:
        """(n,) int64: the first row of each of these blocks."""
        return self._block_start[blocks]

    def _line(self, epoch: int) -> np.ndarray:
        """(rows of the epoch,): row ids. The rows of a block that are used at least once lie together, so do those that
        are used at least twice, and so on. The order of these runs is random.
        """
        uses = self.uses(epoch)
        passes = []
        rows = np.flatnonzero(uses).astype(self._rows.dtype)
        while len(rows):
            passes.append(rows)
            uses[rows] -= 1
            rows = rows[uses[rows] > 0]
        rows = np.concatenate(passes)
        blocks = np.searchsorted(self._block_start, rows, "right")
        is_first = (np.diff(blocks, prepend=-1) != 0) | (np.diff(rows, prepend=-1) <= 0)  # another block or pass
        starts = np.flatnonzero(is_first)
        counts = np.diff(starts, append=len(rows))
        order = self._rng(epoch).permutation(len(starts))
        return rows[runs(starts[order], counts[order])]

    def _reads(self, start: int, places: np.ndarray, line: np.ndarray) -> Iterator[BlockRead]:
        """Cut the rows start, start + 1, ... of the line at the borders of the blocks and where rows are left out."""
        return split_rows(line[start : start + len(places)], places, self._block_start)


def split_rows(rows: np.ndarray, places: np.ndarray, block_start: np.ndarray) -> Iterator[BlockRead]:
    """Cut row ids, (n,), into runs of neighbouring rows of one block. block_start: (blocks,) the first row of each."""
    blocks = np.searchsorted(block_start, rows, "right") - 1
    cuts = np.flatnonzero((np.diff(rows, prepend=-2) != 1) | (np.diff(blocks, prepend=-1) != 0))
    blocks = blocks[cuts]
    firsts = rows[cuts] - block_start[blocks]
    bounds = [*cuts.tolist(), len(rows)]
    for block, first, cut, end in zip(blocks.tolist(), firsts.tolist(), bounds, bounds[1:], strict=False):
        yield BlockRead(block, first, places[cut:end])


VAL_SEED = 0
"""Seed of the validation rows. It is not run.seed: runs with other seeds are validated on the same rows, and none of
them is ever trained on."""
MIN_STRATA = 1024
"""A file is cut into at least this many parts, each of which gives a share of its rows."""


class Subset(DerivedSource):
    """Some rows of another source. A block has those of its rows that belong to the subset, in their order."""

    def __init__(self, name: str, source: Source, row_ids: np.ndarray):
        """row_ids: (n,) ascending."""
        super().__init__(name, source)
        if source.mixture:
            self.mixture = source.mixture._replace(groups=source.mixture.groups[row_ids])
        self.fields = dict(source.fields)
        self.lengths = {}
        for field, lengths in source.lengths.items():
            self.lengths[field] = lengths[row_ids]
            self.fields[field] = source.fields[field]._replace(mean_values=float(lengths[row_ids].mean()))
        self.row_ids = row_ids
        """(n,) the row of the source that each row is."""
        self._source_start = np.cumsum(source.block_rows, dtype=np.int64) - source.block_rows
        starts = np.searchsorted(row_ids, self._source_start)
        block_rows = np.diff(starts, append=len(row_ids))
        self.block_rows = block_rows[block_rows > 0].astype(np.int32)
        self._block_start = starts[block_rows > 0]

    def __len__(self) -> int:
        return len(self.row_ids)

    def column(self, name: str) -> np.ndarray:
        """One small field of all rows, (rows, *shape). Raises KeyError if it is not in memory."""
        return self._source.column(name)[self.row_ids]

    def read(self, reads: Iterable[BlockRead], out: Mapping[str, Any]) -> None:
        """Copy the rows of each read to their places (see `Source.read`). Thread-safe."""
        self._source.read(self._in_source(reads), out)

    def _in_source(self, reads: Iterable[BlockRead]) -> Iterator[BlockRead]:
        """The same reads in blocks of the source."""
        for block, first, places in reads:
            start = int(self._block_start[block]) + first
            yield from split_rows(self.row_ids[start : start + len(places)], places, self._source_start)


def hold_out(source: Source, share: float) -> tuple[Source, Source]:
    """(rows to train on, rows to validate on): no row is in both, and together they are all.

    share: of the rows to validate on, rounded to whole rows. Which rows they are depends on the source and the share
    only. Each of at least `MIN_STRATA` parts of the source gives neighbouring rows, so that the share is fair whatever
    the order of the rows, and reads stay long. Raises UserError if one side would be empty.
    """
    n_rows = len(source)
    n_val = round(share * n_rows)
    if not 0 < n_val < n_rows:
        raise UserError(
            f"data.val is {100 * share:g}%, which is {n_val} of the {n_rows} rows of {source.name}; use a share that "
            "leaves rows to train on and rows to validate on"
        )
    is_val = _choose_rows(len(source.block_rows), n_rows, n_val)
    train_name = f"{source.name} ({n_rows - n_val:,} of its rows; {n_val:,} are for validation)"
    val_name = f"{source.name} ({n_val:,} of its rows)"
    return _take(source, train_name, ~is_val), _take(source, val_name, is_val)


def _take(source: Source, name: str, is_member: np.ndarray) -> Source:
    row_ids = np.flatnonzero(is_member)
    take = getattr(source, "take", None)  # of a Dataset, which is asked for fewer items
    return take(name, row_ids) if take else Subset(name, source, row_ids)


def _choose_rows(n_blocks: int, n_rows: int, n_chosen: int) -> np.ndarray:
    """(rows,) bool with `n_chosen` times True: a run of rows in each of many equal strata."""
    rng = np.random.default_rng(VAL_SEED)
    n_strata = min(n_rows, max(MIN_STRATA, n_blocks))
    bounds = np.arange(n_strata + 1) * n_rows // n_strata
    rows = np.diff(bounds)
    order = rng.permutation(n_strata)  # chance decides which strata give one row more than others
    chosen = np.empty_like(rows)
    chosen[order] = np.diff(np.cumsum(rows[order]) * n_chosen // n_rows, prepend=0)
    offset = rng.integers(0, rows)  # where the run begins; it goes round, so that each row has the same chance
    stratum = np.repeat(np.arange(n_strata), chosen)
    turn = np.arange(n_chosen) - (np.cumsum(chosen) - chosen)[stratum]
    is_chosen = np.zeros(n_rows, bool)
    is_chosen[bounds[stratum] + (offset[stratum] + turn) % rows[stratum]] = True
    return is_chosen
