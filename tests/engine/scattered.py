"""Read a source in the way pools are filled: in parts of blocks, each row to a shuffled place; or by jobs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from harness import PLAN, reads_of

from fastgpu.rows.contract import Dataset
from fastgpu.rows.rows import RaggedArray
from fastgpu.storage.store import HDF5Dataset

N_SPARE = 5
SPARE_VALUE = 7


def read_scattered(source: Dataset, seed: int = 0) -> dict[str, Any]:
    """{field: array or RaggedArray}: all rows, brought back to the order of the source."""
    rng = np.random.default_rng(seed)
    n_rows = int(source.block_rows.sum())
    places = rng.permutation(n_rows)
    out = {}
    for name, field in source.fields.items():
        if field.is_ragged:
            offsets = np.zeros(n_rows + 1, np.int32)
            offsets[places + 1] = source.lengths[name]
            np.cumsum(offsets, out=offsets)
            shape = (offsets[-1] + N_SPARE, *field.shape)
            out[name] = RaggedArray(np.full(shape, SPARE_VALUE, field.dtype), offsets)
        else:
            out[name] = np.zeros((n_rows, *field.shape), field.dtype)
    start = 0
    for n_rows in source.block_rows.tolist():
        cut = int(rng.integers(0, n_rows + 1))
        for first, stop in {(0, cut), (cut, n_rows)} - {(0, 0), (n_rows, n_rows)}:
            source.read(PLAN, reads_of((start + first, places[start + first : start + stop])), out)
        start += n_rows
    return {name: _in_order(column, places) for name, column in out.items()}


def _in_order(column: np.ndarray | RaggedArray, places: np.ndarray) -> np.ndarray | RaggedArray:
    if not isinstance(column, RaggedArray):
        return column[places]
    assert (column.values[column.offsets[-1] :] == SPARE_VALUE).all()  # nothing is written behind the last value
    lengths = np.diff(column.offsets)[places]
    return RaggedArray(column.values[column.places(places)], np.concatenate([[0], np.cumsum(lengths)]))


def jobs_of(source: HDF5Dataset, row_ids: np.ndarray, n_rows: int) -> tuple[list[Callable[[], None]], dict[str, Any]]:
    """(jobs of `n_rows` rows each, where these go), as the feed makes them: the rows `row_ids` of dense fields."""
    places = np.arange(len(row_ids))
    reads = reads_of(*[(row, places[place : place + 1]) for place, row in enumerate(row_ids.tolist())])
    out = {name: np.zeros((len(row_ids), *field.shape), field.dtype) for name, field in source.fields.items()}
    plan = PLAN._replace(n_rows=len(row_ids), reads=reads)
    jobs = source.gathers(plan, out, n_rows)
    return jobs or [partial(source.read, plan, portion, out) for portion in reads.portions(n_rows)], out


def read_by_jobs(source: HDF5Dataset, row_ids: np.ndarray, n_rows: int) -> dict[str, Any]:
    """The rows `row_ids`, read in parts of `n_rows`."""
    jobs, out = jobs_of(source, row_ids, n_rows)
    for job in jobs:
        job()
    return out
