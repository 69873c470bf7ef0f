"""The rows of an epoch that does not have each row once: a share that is held out, sources at weights, equal classes.

A selection is a function of the epoch that gives extents: runs of neighbouring rows of one block. The sampler puts them
in order. The files are read as if nothing were selected, so row numbers are those of the files.

A mixture has sources at given weights, or classes in equal numbers. Each group of rows (a source or a class) gets a
share of the epoch, its turns. If it has fewer rows than turns, its rows come several times; if it has more, each epoch
takes the next ones:

    rows of a group, in a random order     | 4 | 0 | 5 | 2 | 1 | 3 |      6 rows, 8 turns in each epoch
    epoch 0, each row once, then 2 more      x   x
    epoch 1, each row once, then 2 more              x   x

So the rows of a group are used equally often, up to one turn, over any number of epochs.
"""

import zlib
from typing import NamedTuple

import numpy as np

from fastgpu.rows.contract import runs

SEED = 0
"""Seed of the validation rows. It is not run.seed: runs with other seeds are validated on the same rows, and none of
them is ever trained on."""
MIN_STRATA = 1024
"""A file is cut into at least this many parts, each of which gives a share of its rows."""
MAX_GROUPS_SHOWN = 5
"""Number of sources or classes that are listed one by one."""


class Extents(NamedTuple):
    """Runs of neighbouring rows of one block, one run after the other."""

    starts: np.ndarray
    """(extents,) the first row of each."""
    counts: np.ndarray
    """(extents,) the number of rows of each."""
    units: np.ndarray
    """(units,) the first extent of each unit, which stays together: a block, or a pass over it."""

    def permuted(self, order: np.ndarray) -> "Extents":
        """The units in another order."""
        if len(self.units) == len(self.starts):
            index = order
        else:
            index = runs(self.units[order], np.diff(self.units, append=len(self.starts))[order])
        return Extents(self.starts[index], self.counts[index], self.units)


class AllRows:
    """Each row once."""

    def __init__(self, block_rows: np.ndarray):
        """block_rows: (blocks,) number of rows in each block."""
        self._block_rows = np.asarray(block_rows, np.int32)
        self.epoch_rows = int(self._block_rows.sum(dtype=np.int64))
        self.checksum = zlib.crc32(self._block_rows.tobytes())

    def extents(self, epoch: int) -> Extents:
        """The blocks of the file."""
        starts = np.cumsum(self._block_rows, dtype=np.int64)
        starts -= self._block_rows
        return Extents(starts, self._block_rows, np.arange(len(starts), dtype=np.int32))


class Share:
    """Each of some rows once: those that are held out for validation, or the others."""

    def __init__(self, block_rows: np.ndarray, is_member: np.ndarray):
        """block_rows: (blocks,) of the file. is_member: (rows,) bool."""
        block_start = np.cumsum(block_rows, dtype=np.int64) - block_rows
        self._is_member = np.packbits(is_member)
        self._extents = _extents_of([np.flatnonzero(is_member)], block_start)
        self.epoch_rows = int(is_member.sum())
        self.checksum = zlib.crc32(self._is_member.tobytes())

    def __len__(self) -> int:
        return self.epoch_rows

    def rows(self) -> np.ndarray:
        """(n,) int64: these rows, in the order of the file."""
        return np.flatnonzero(np.unpackbits(self._is_member))

    def extents(self, epoch: int) -> Extents:
        """The rows of any epoch in the order of the file."""
        return self._extents


class Groups(NamedTuple):
    """Groups of rows, and the weight of each group in an epoch."""

    names: tuple[str, ...]
    """Name of each group, for messages."""
    weights: tuple[float, ...]
    """Weight of each group, in any unit."""
    groups: np.ndarray
    """(rows,) whole numbers: the group of each row. -1: the row is in no epoch."""
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


class Mixture:
    """Groups of rows at given weights.

    An epoch has as many rows as there are in all groups, rounded down to whole global batches, so that no turn is left
    out. Like the plain order, it is a function of (seed, epoch). It needs memory for each row: 12 bytes always, and
    about 60 while an epoch is planned.
    """

    def __init__(self, groups: Groups, block_rows: np.ndarray, batch_size: int, seed: int):
        """block_rows: (blocks,) of the file. batch_size: rows of a global batch. seed: of the order within groups."""
        self.groups = groups
        self._block_start = np.cumsum(block_rows, dtype=np.int64) - block_rows
        self._rows = self._order_rows(seed)  # group after group
        self._group_rows = np.bincount(groups.groups[self._rows], minlength=len(groups.names))
        self.epoch_rows = len(self._rows) // batch_size * batch_size
        self.turns = groups.turns(self.epoch_rows)
        self.checksum = zlib.crc32(self.turns.tobytes(), zlib.crc32(groups.groups.tobytes()))

    def _order_rows(self, seed: int) -> np.ndarray:
        """(rows,): the rows of each group in the order in which epochs take them: whole blocks, or single rows."""
        members = np.flatnonzero(self.groups.groups >= 0)
        unit_start = np.arange(len(members))
        if self.groups.by_block:
            blocks = np.searchsorted(self._block_start, members, "right")
            unit_start = np.flatnonzero(np.diff(blocks, prepend=-1))
        unit_rows = np.diff(unit_start, append=len(members))
        rng = np.random.default_rng(np.random.SeedSequence((seed, 0), spawn_key=(0,)))
        units = rng.permutation(len(unit_start))
        units = units[np.argsort(self.groups.groups[members[unit_start[units]]], kind="stable")]
        return members[runs(unit_start[units], unit_rows[units])]

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self) -> np.ndarray:
        """(n,) int64: the rows of all groups, in the order of the file."""
        return np.sort(self._rows)

    def uses(self, epoch: int) -> np.ndarray:
        """(rows,) whole numbers: how often each row is used in an epoch."""
        passes, extra = np.divmod(self.turns, self._group_rows)
        uses = np.zeros(len(self.groups.groups), np.min_scalar_type(int(passes.max()) + 1))
        start = 0
        for n_rows, n_passes, n_extra in zip(self._group_rows.tolist(), passes.tolist(), extra.tolist(), strict=True):
            rows = self._rows[start : start + n_rows]
            uses[rows] = n_passes
            window = (epoch * n_extra + np.arange(n_extra)) % n_rows
            uses[rows[window]] += 1
            start += n_rows
        return uses

    def extents(self, epoch: int) -> Extents:
        """The rows that are used at least once in the order of the file, then those used at least twice, and so on.

        The rows of a block in one of these passes are a unit.
        """
        uses = self.uses(epoch)
        passes = [np.flatnonzero(uses > n_times) for n_times in range(int(uses.max()))]
        return _extents_of(passes, self._block_start)

    def describe(self) -> str:
        """How many rows of each group an epoch has, for people."""
        n_shown = min(len(self.turns), MAX_GROUPS_SHOWN)
        shares = (self.turns / self._group_rows).tolist()
        groups = [f"{self.turns[n]:,} rows of {self.groups.names[n]} ({shares[n]:.3g} passes)" for n in range(n_shown)]
        n_more = len(self.turns) - n_shown
        return ", ".join(groups) + (f", and those of {n_more:,} more" if n_more else "")


def hold_out(block_rows: np.ndarray, n_val: int) -> tuple[Share, Share]:
    """(rows to train on, `n_val` rows to validate on): no row is in both, and together they are all.

    Which rows they are depends on the arguments only. Each of at least `MIN_STRATA` parts of the file gives
    neighbouring rows, so that the share is fair whatever the order of the rows, and reads stay long.
    """
    n_rows = int(np.sum(block_rows))
    rng = np.random.default_rng(SEED)
    n_strata = min(n_rows, max(MIN_STRATA, len(block_rows)))
    bounds = np.arange(n_strata + 1) * n_rows // n_strata
    rows = np.diff(bounds)
    order = rng.permutation(n_strata)  # chance decides which strata give one row more than others
    chosen = np.empty_like(rows)
    chosen[order] = np.diff(np.cumsum(rows[order]) * n_val // n_rows, prepend=0)
    offset = rng.integers(0, rows)  # where the run begins; it goes round, so that each row has the same chance
    stratum = np.repeat(np.arange(n_strata), chosen)
    turn = np.arange(n_val) - (np.cumsum(chosen) - chosen)[stratum]
    is_val = np.zeros(n_rows, bool)
    is_val[bounds[stratum] + (offset[stratum] + turn) % rows[stratum]] = True
    return Share(block_rows, ~is_val), Share(block_rows, is_val)


def _extents_of(passes: list[np.ndarray], block_start: np.ndarray) -> Extents:
    """passes: ascending row numbers. The rows of a block in one pass are a unit. block_start: (blocks,)"""
    parts = [(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, bool))]
    for rows in passes:
        blocks = np.searchsorted(block_start, rows, "right") - 1
        cuts = np.flatnonzero((np.diff(rows, prepend=-2) != 1) | (np.diff(blocks, prepend=-1) != 0))
        is_unit = np.diff(blocks[cuts], prepend=-1) != 0
        parts.append((rows[cuts], np.diff(cuts, append=len(rows)), is_unit))
    starts, counts, is_unit = map(np.concatenate, zip(*parts, strict=True))
    return Extents(starts, counts, np.flatnonzero(is_unit))
