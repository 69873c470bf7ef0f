"""A part of the rows of a source: what is left for training, or is held out for validation."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from fastgpu.dataset.source import DatasetSource
from fastgpu.process.launch import UserError
from fastgpu.rows.contract import BlockRead, DerivedSource, Source
from fastgpu.rows.mixture import split_rows

SEED = 0
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
    return source.take(name, row_ids) if isinstance(source, DatasetSource) else Subset(name, source, row_ids)


def _choose_rows(n_blocks: int, n_rows: int, n_chosen: int) -> np.ndarray:
    """(rows,) bool with `n_chosen` times True: a run of rows in each of many equal strata."""
    rng = np.random.default_rng(SEED)
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
