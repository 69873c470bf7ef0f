"""A part of the rows of a source: what is left for training, or is held out for validation."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from fastgpu.process.launch import UserError
from fastgpu.rows.contract import BlockRead, Source
from fastgpu.storage.dataset import DatasetSource

SEED = 0
"""Seed of the validation rows. It is not run.seed: runs with other seeds are validated on the same rows, and none of
them is ever trained on."""
MIN_STRATA = 1024
"""A file is cut into at least this many parts, each of which gives a share of its rows."""


class Subset(Source):
    """Some rows of another source. A block has those of its rows that belong to the subset, in their order."""

    def __init__(self, name: str, source: Source, is_member: np.ndarray):
        """is_member: (rows of the source,) bool."""
        self.name = name
        self.attributes = source.attributes
        self.filters = source.filters
        self.by_h5py = source.by_h5py
        if source.mixture:
            self.mixture = source.mixture._replace(groups=source.mixture.groups[is_member])
        self._source = source
        self._is_member = is_member
        self.lengths = {field: lengths[is_member] for field, lengths in source.lengths.items()}
        means = {field: float(lengths.mean()) for field, lengths in self.lengths.items()}
        self.fields = {
            name: field._replace(mean_values=means.get(name, field.mean_values))
            for name, field in source.fields.items()
        }
        block_start = np.cumsum(source.block_rows, dtype=np.int64) - source.block_rows
        changes = np.flatnonzero(np.diff(is_member)) + 1
        starts = np.union1d(block_start, changes)  # of runs of neighbouring rows that are members, or are not
        rows = np.diff(starts, append=len(source))
        self._run_rows = rows[is_member[starts]]
        starts = starts[is_member[starts]]
        self._run_block = np.searchsorted(block_start, starts, "right") - 1
        self._run_first = starts - block_start[self._run_block]
        self._run_start = np.cumsum(self._run_rows) - self._run_rows  # counted in rows of the subset
        block_rows = np.bincount(self._run_block, self._run_rows).astype(np.int32)
        self.block_rows = block_rows[block_rows > 0]
        self._block_start = np.cumsum(self.block_rows, dtype=np.int64) - self.block_rows

    def __len__(self) -> int:
        return int(self.block_rows.sum())

    def column(self, name: str) -> np.ndarray:
        """One small field of all rows, (rows, *shape). Raises KeyError if it is not in memory."""
        return self._source.column(name)[self._is_member]

    def read(self, reads: Iterable[BlockRead], out: Mapping[str, Any]) -> None:
        """Copy the rows of each read to their places (see `Source.read`). Thread-safe."""
        self._source.read(self._runs(reads), out)

    def _runs(self, reads: Iterable[BlockRead]) -> Iterator[BlockRead]:
        """The same reads in blocks of the source, cut where rows of others lie between."""
        for block, first, places in reads:
            start = int(self._block_start[block]) + first
            run = int(np.searchsorted(self._run_start, start, "right")) - 1
            skipped = start - int(self._run_start[run])
            done = 0
            while done < len(places):
                part = places[done : done + int(self._run_rows[run]) - skipped]
                yield BlockRead(int(self._run_block[run]), int(self._run_first[run]) + skipped, part)
                done += len(part)
                run += 1
                skipped = 0


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
    is_val = _choose_rows(source.block_rows, n_val)
    train_name = f"{source.name} ({n_rows - n_val:,} of its rows; {n_val:,} are for validation)"
    val_name = f"{source.name} ({n_val:,} of its rows)"
    if isinstance(source, DatasetSource):
        return source.take(train_name, np.flatnonzero(~is_val)), source.take(val_name, np.flatnonzero(is_val))
    return Subset(train_name, source, ~is_val), Subset(val_name, source, is_val)


def _choose_rows(block_rows: np.ndarray, n_chosen: int) -> np.ndarray:
    """(rows,) bool with `n_chosen` times True: a run of rows in each stratum of a block."""
    rng = np.random.default_rng(SEED)
    n_rows = int(block_rows.sum(dtype=np.int64))
    strata_of_block = -(-block_rows.astype(np.int64) // max(1, n_rows // MIN_STRATA))
    block = np.repeat(np.arange(len(block_rows)), strata_of_block)
    number = np.arange(len(block)) - np.repeat(np.cumsum(strata_of_block) - strata_of_block, strata_of_block)
    first = number * block_rows[block] // strata_of_block[block]
    rows = (number + 1) * block_rows[block] // strata_of_block[block] - first
    order = rng.permutation(len(rows))  # chance decides which strata give one row more than others
    chosen = np.empty_like(rows)
    chosen[order] = np.diff(np.cumsum(rows[order]) * n_chosen // n_rows, prepend=0)
    offset = rng.integers(0, rows)  # where the run begins; it goes round, so that each row has the same chance
    stratum = np.repeat(np.arange(len(rows)), chosen)
    turn = np.arange(n_chosen) - (np.cumsum(chosen) - chosen)[stratum]
    start = np.cumsum(rows) - rows
    is_chosen = np.zeros(n_rows, bool)
    is_chosen[start[stratum] + (offset[stratum] + turn) % rows[stratum]] = True
    return is_chosen
