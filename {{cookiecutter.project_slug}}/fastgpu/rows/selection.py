"""The rows of an epoch that does not have each row once: a share that is held out, sources at weights, equal classes.

A selection gives extents for each epoch, and the sampler puts them in order. Row numbers are those of the files, which
are read as if nothing were selected.

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

from fastgpu.rows.rows import runs


class Extents(NamedTuple):
    """Runs of neighbouring rows of one block, one run after the other."""

    starts: np.ndarray
    """(extents,) the first row of each."""
    counts: np.ndarray
    """(extents,) the number of rows of each."""
    units: np.ndarray | None = None
    """(units,) the first extent of each unit, which stays together: a block, or a pass over it. None: each is one."""

    @property
    def n_units(self) -> int:
        return len(self.starts if self.units is None else self.units)

    def of_units(self, units: np.ndarray) -> np.ndarray:
        """(extents,) the numbers of the extents of these units, one unit after the other."""
        if self.units is None:
            return units
        return runs(self.units[units], np.diff(self.units, append=len(self.starts))[units])


class Share:
    """Each of some rows once: all of them, those that are held out for validation, or the others."""

    def __init__(self, block_rows: np.ndarray, is_member: np.ndarray | None = None):
        """block_rows: (blocks,) of the file. is_member: (rows,) bool. None: all rows, by their blocks alone."""
        block_rows = np.asarray(block_rows, np.int32)
        block_start = np.cumsum(block_rows, dtype=np.int64) - block_rows
        if is_member is None:
            self._extents = Extents(block_start, block_rows)
            self.checksum = zlib.crc32(block_rows.tobytes())
        else:
            self._extents = _extents_of(np.flatnonzero(is_member), block_start)
            self.checksum = zlib.crc32(np.packbits(is_member).tobytes())
        self.epoch_rows = int(self._extents.counts.sum(dtype=np.int64))

    def __len__(self) -> int:
        return self.epoch_rows

    def rows(self) -> np.ndarray:
        """(n,) int64: these rows, in the order of the file."""
        return runs(self._extents.starts, self._extents.counts)

    def extents(self, epoch: int) -> Extents:
        """The rows of any epoch in the order of the file."""
        return self._extents


class Groups(NamedTuple):
    """Groups of rows: their names, for messages, and their weights in an epoch, in any unit."""

    names: tuple[str, ...]
    weights: tuple[float, ...]
    groups: np.ndarray
    """(rows,) whole numbers: the group of each row. -1: the row is in no epoch."""
    by_block: bool
    """Whether all rows of a block are in one group. Blocks are then used as a whole, so that reads stay long."""


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
        weights = np.asarray(groups.weights, np.float64)
        exact = self.epoch_rows * weights / weights.sum()
        self.turns = np.floor(exact).astype(np.int64)
        """(groups,) the rows of each group in an epoch (largest remainders)."""
        largest_first = np.argsort(self.turns - exact, kind="stable")
        self.turns[largest_first[: self.epoch_rows - self.turns.sum()]] += 1
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

    def extents(self, epoch: int) -> Extents:
        """The rows that are used at least once in the order of the file, then those used at least twice, and so on.

        The rows of a block in one of these passes are a unit.
        """
        passes, extra = np.divmod(self.turns, self._group_rows)
        uses = np.zeros(len(self.groups.groups), np.min_scalar_type(int(passes.max()) + 1))  # of each row
        uses[self._rows] = np.repeat(passes, self._group_rows)
        window = runs(epoch * extra, extra) % np.repeat(self._group_rows, extra)
        uses[self._rows[np.repeat(np.cumsum(self._group_rows) - self._group_rows, extra) + window]] += 1
        rows = [np.flatnonzero(uses > n_times) for n_times in range(int(uses.max()))]
        return _extents_of(np.concatenate(rows), self._block_start)

    def describe(self) -> str:
        """How many rows of each group an epoch has, or of the first ones, for people."""
        groups = zip(self.groups.names, self.turns.tolist(), (self.turns / self._group_rows).tolist(), strict=True)
        texts = [f"{n_rows:,} rows of {name} ({n_passes:.3g} passes)" for name, n_rows, n_passes in groups]
        return ", ".join(texts[:5] + ["..."] * (len(texts) > 5))


def hold_out(block_rows: np.ndarray, n_val: int) -> tuple[Share, Share]:
    """(rows to train on, `n_val` rows to validate on): no row is in both, and together they are all.

    Which rows they are depends on the arguments only: runs with other seeds are validated on the same rows, and none of
    them is ever trained on. Each of at least 1,024 parts of the file gives neighbouring rows, so that the share is fair
    whatever the order of the rows, and reads stay long.
    """
    n_rows = int(np.sum(block_rows))
    rng = np.random.default_rng(0)
    n_strata = min(n_rows, max(1024, len(block_rows)))
    bounds = np.arange(n_strata + 1) * n_rows // n_strata
    rows = np.diff(bounds)
    order = rng.permutation(n_strata)  # chance decides which strata give one row more than others
    chosen = np.empty_like(rows)
    chosen[order] = np.diff(np.cumsum(rows[order]) * n_val // n_rows, prepend=0)
    offset = rng.integers(0, rows)  # where the run begins; it goes round, so that each row has the same chance
    is_val = np.zeros(n_rows, bool)
    is_val[np.repeat(bounds[:-1], chosen) + runs(offset, chosen) % np.repeat(rows, chosen)] = True
    return Share(block_rows, ~is_val), Share(block_rows, is_val)


def _extents_of(rows: np.ndarray, block_start: np.ndarray) -> Extents:
    """rows: in one or more passes over the file, in its order; the rows of a block in one pass are a unit."""
    blocks = np.searchsorted(block_start, rows, "right")
    steps = np.diff(rows, prepend=-2)
    begins_unit = (np.diff(blocks, prepend=-1) != 0) | (steps <= 0)
    cuts = np.flatnonzero((steps != 1) | begins_unit)
    return Extents(rows[cuts], np.diff(cuts, append=len(rows)), np.flatnonzero(begins_unit[cuts]))
