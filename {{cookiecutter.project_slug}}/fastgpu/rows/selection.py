"""The rows of an epoch, if it does not have each row once: a subset, or groups at given weights.

A `Subset` has each of its rows once: the rows that are held out for validation, or the others. A `Mixture` has files at
given weights, or classes in equal numbers. Both list the rows of an epoch in the order of the file, as runs of
neighbouring rows, which order.py shuffles. Selected rows keep their row numbers in the file.

In a mixture each group of rows (the files of a weight, or a class) has a quota: its number of rows in an epoch. If the
group has fewer rows than its quota, rows are repeated; if it has more, each epoch takes the next rows:

    rows of a group, in a random order     | 4 | 0 | 5 | 2 | 1 | 3 |      6 rows, a quota of 8
    epoch 0, each row once, then 2 more      x   x
    epoch 1, each row once, then 2 more              x   x

So over any number of epochs, the numbers of uses of two rows of a group differ by at most one.
"""

import zlib
from typing import NamedTuple

import numpy as np


class Runs(NamedTuple):
    """Runs of consecutive numbers: of rows, or of the values of ragged rows."""

    starts: np.ndarray
    """(runs,) the first number of each run."""
    counts: np.ndarray
    """(runs,) the length of each run."""

    def numbers(self) -> np.ndarray:
        """(sum of counts,) int64: all the numbers, run after run."""
        before = np.cumsum(self.counts, dtype=np.int64) - self.counts
        numbers = np.repeat(self.starts - before, self.counts)
        numbers += np.arange(len(numbers))
        return numbers

    def take(self, index: np.ndarray) -> "Runs":
        """The runs at `index`."""
        return Runs(self.starts[index], self.counts[index])


class EpochRows(NamedTuple):
    """The rows of an epoch, block after block."""

    runs: Runs
    """Runs of neighbouring rows in one block, in the order of the file, followed by the runs of repeated rows."""
    repeats: np.ndarray | None
    """(runs,) number of earlier occurrences of the rows of each run. None: every row occurs once."""
    order: np.ndarray
    """(runs,) the numbers of the runs, in the order of the epoch."""
    ends: np.ndarray
    """(runs,) the end of each run in the epoch, in the order of the epoch: the number of rows up to its last row."""

    def cut(self, starts: np.ndarray, stops: np.ndarray) -> tuple[np.ndarray, Runs]:
        """Rows `starts[i]` to `stops[i]` - 1 of the epoch for each i: the numbers of their runs, and these runs."""
        starts, stops = starts[starts < stops], stops[starts < stops]
        first = np.searchsorted(self.ends, starts, "right")
        n_runs = np.searchsorted(self.ends, stops - 1, "right") + 1 - first
        places = Runs(first, n_runs).numbers()
        numbers, ends = self.order[places], self.ends[places]
        runs = self.runs.take(numbers)

        # The first and the last run may be cut.
        begins = ends - runs.counts
        cut_begins = np.maximum(begins, np.repeat(starts, n_runs))
        cut_ends = np.minimum(ends, np.repeat(stops, n_runs))
        return numbers, Runs(runs.starts + cut_begins - begins, cut_ends - cut_begins)


class Subset:
    """Rows that an epoch has once each: all rows, the rows held out for validation, or the others."""

    def __init__(self, block_rows: np.ndarray, is_member: np.ndarray | None = None):
        """block_rows: (blocks,) number of rows in each block of the file. is_member: (rows,) bool. None: all rows."""
        block_rows = np.asarray(block_rows, np.int32)
        block_start = np.cumsum(block_rows, dtype=np.int64) - block_rows
        if is_member is None:
            self._runs, self._first_runs = Runs(block_start, block_rows), None
            self.fingerprint = zlib.crc32(block_rows.tobytes())
        else:
            self._runs, self._first_runs, _ = _find_runs(np.flatnonzero(is_member), block_start)
            self.fingerprint = zlib.crc32(np.packbits(is_member).tobytes())
        self.rows_per_epoch = int(self._runs.counts.sum(dtype=np.int64))

    def __len__(self) -> int:
        return self.rows_per_epoch

    def rows(self) -> np.ndarray:
        """(n,) int64: these rows, in the order of the file."""
        return self._runs.numbers()

    def in_epoch(self, epoch: int, rng: np.random.Generator | None = None) -> EpochRows:
        """The rows of this subset. rng: shuffles the blocks. None: the order of the file."""
        return _order_blocks(self._runs, self._first_runs, None, rng)


class Groups(NamedTuple):
    """Groups of rows, with their names for messages, and their weights in an epoch in any unit."""

    names: tuple[str, ...]
    weights: tuple[float, ...]
    groups: np.ndarray
    """(rows,) whole numbers: the group of each row. -1: the row is in no epoch."""


class Mixture:
    """Groups of rows at given weights.

    An epoch has as many rows as all groups together, rounded down to whole global batches, so that every quota is met
    exactly. It is a function of (seed, epoch). A mixture needs 12 bytes of memory for each row, and about 60 bytes
    while an epoch is planned.
    """

    def __init__(self, groups: Groups, block_rows: np.ndarray, batch_size: int, seed: int):
        """block_rows: (blocks,). batch_size: rows of a global batch. seed: of the order of the rows in each group."""
        self.groups = groups
        self._block_start = np.cumsum(block_rows, dtype=np.int64) - block_rows
        self._rows_of_groups = self._order_rows(seed)
        n_rows = sum(map(len, self._rows_of_groups))
        self.rows_per_epoch = n_rows // batch_size * batch_size
        weights = np.asarray(groups.weights, np.float64)
        exact = self.rows_per_epoch * weights / weights.sum()
        self.quotas = np.floor(exact).astype(np.int64)
        """(groups,) rows of each group in an epoch, rounded up where the remainders are largest."""
        largest_first = np.argsort(self.quotas - exact, kind="stable")
        self.quotas[largest_first[: self.rows_per_epoch - self.quotas.sum()]] += 1
        self.fingerprint = zlib.crc32(self.quotas.tobytes(), zlib.crc32(groups.groups.tobytes()))

    def _order_rows(self, seed: int) -> list[np.ndarray]:
        """For each group, its rows in the order in which epochs take them."""
        rows = self.rows()
        groups = self.groups.groups[rows]
        starts_block = np.diff(np.searchsorted(self._block_start, rows, "right"), prepend=-1) != 0
        starts_group = np.diff(groups, prepend=-1) != 0

        # If each block belongs to one group, blocks are taken as a whole, so that reads stay long.
        starts = np.flatnonzero(starts_block)
        if (starts_group & ~starts_block).any():
            starts = np.arange(len(rows))
        runs = Runs(starts, np.diff(starts, append=len(rows)))

        rng = np.random.default_rng(np.random.SeedSequence((seed, 0), spawn_key=(0,)))
        order = rng.permutation(len(starts))
        order = order[np.argsort(groups[starts[order]], kind="stable")]
        rows = rows[runs.take(order).numbers()]
        n_rows = np.bincount(groups, minlength=len(self.groups.names))
        return np.split(rows, np.cumsum(n_rows)[:-1])

    def __len__(self) -> int:
        return sum(map(len, self._rows_of_groups))

    def rows(self) -> np.ndarray:
        """(n,) int64: the rows of all groups, each once, in the order of the file."""
        return np.flatnonzero(self.groups.groups >= 0)

    def in_epoch(self, epoch: int, rng: np.random.Generator | None = None) -> EpochRows:
        """The rows that occur at least once, then the rows that occur at least twice, and so on. rng: see `Subset`."""
        n_uses = np.zeros(len(self.groups.groups), np.int32)
        for rows, quota in zip(self._rows_of_groups, self.quotas.tolist(), strict=True):
            n_passes, n_more = divmod(quota, len(rows))
            n_uses[rows] = n_passes
            # Each epoch begins where the epoch before has ended, and continues at the first row after the last.
            next_rows = np.arange(epoch * n_more, (epoch + 1) * n_more) % len(rows)
            n_uses[rows[next_rows]] += 1
        rows_of_passes = [np.flatnonzero(n_uses > number) for number in range(n_uses.max())]
        return _order_blocks(*_find_runs(np.concatenate(rows_of_passes), self._block_start), rng)

    def describe(self) -> str:
        """The number of rows of each group in an epoch, in words. Only the first five groups are listed."""
        groups = zip(self.groups.names, self._rows_of_groups, self.quotas.tolist(), strict=True)
        texts = [f"{quota:,} rows of {name} ({quota / len(rows):.3g} passes)" for name, rows, quota in groups]
        return ", ".join(texts[:5] + ["..."] * (len(texts) > 5))


Selection = Subset | Mixture


def hold_out(block_rows: np.ndarray, n_val: int) -> tuple[Subset, Subset]:
    """(rows to train on, `n_val` rows to validate on): each row is in one of the two subsets.

    The subsets depend on the arguments only: runs with other seeds are validated on the same rows, and never train on
    them. Each of at least 1,024 sections of the file gives neighbouring rows, so that the share is fair for any order
    of the rows, and reads stay long.
    """
    n_rows = int(np.sum(block_rows))
    rng = np.random.default_rng(0)
    n_sections = min(n_rows, max(1024, len(block_rows)))
    bounds = np.arange(n_sections + 1) * n_rows // n_sections
    section_rows = np.diff(bounds)

    # The sections that give one row more than others are chosen at random.
    order = rng.permutation(n_sections)
    n_chosen = np.empty_like(section_rows)
    n_chosen[order] = np.diff(np.cumsum(section_rows[order]) * n_val // n_rows, prepend=0)

    # The run begins anywhere in its section and wraps around, so that each row has the same chance.
    runs = Runs(rng.integers(0, section_rows), n_chosen)
    is_val = np.zeros(n_rows, bool)
    in_section = runs.numbers() % np.repeat(section_rows, n_chosen)
    is_val[np.repeat(bounds[:-1], n_chosen) + in_section] = True
    return Subset(block_rows, ~is_val), Subset(block_rows, is_val)


def _find_runs(rows: np.ndarray, block_start: np.ndarray) -> tuple[Runs, np.ndarray, np.ndarray | None]:
    """The runs of an epoch; the first run of each block, (blocks,); and the earlier occurrences of each run's rows.

    rows: in the order of the file, followed by the repeated rows in the order of the file, and so on.
    """
    blocks = np.searchsorted(block_start, rows, "right")
    steps = np.diff(rows, prepend=-2)
    starts_again = steps <= 0
    starts_block = (np.diff(blocks, prepend=-1) != 0) | starts_again
    cuts = np.flatnonzero((steps != 1) | starts_block)
    runs = Runs(rows[cuts], np.diff(cuts, append=len(rows)))
    repeats = np.cumsum(starts_again[cuts]) if starts_again.any() else None
    return runs, np.flatnonzero(starts_block[cuts]), repeats


def _order_blocks(
    runs: Runs, first_runs: np.ndarray | None, repeats: np.ndarray | None, rng: np.random.Generator | None
) -> EpochRows:
    """See `_find_runs`. The runs of a block stay together; first_runs is None if a block is one run."""
    n_runs = len(runs.starts)
    order = np.arange(n_runs if first_runs is None else len(first_runs), dtype=np.int32)
    if rng:
        rng.shuffle(order)
    if first_runs is not None:
        order = Runs(first_runs, np.diff(first_runs, append=n_runs)).take(order).numbers()
    # Summed up in place: there may be ten million blocks.
    ends = runs.counts[order].astype(np.int64)
    np.cumsum(ends, out=ends)
    return EpochRows(runs, repeats, order, ends)
