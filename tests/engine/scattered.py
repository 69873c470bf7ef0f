"""Read a source in the way pools are filled: in parts of blocks, each row to a shuffled place; or by jobs."""

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from harness import PLAN, reads_of

from fastgpu.rows.contract import Dataset
from fastgpu.rows.rows import RaggedArray
from fastgpu.storage.store import HDF5Dataset


def read_scattered(source: Dataset) -> dict[str, Any]:
    """{field: array or RaggedArray}: all rows, brought back to the order of the source."""
    rng = np.random.default_rng(0)
    stops = np.cumsum(source.block_rows)
    n_rows = int(stops[-1])
    places = rng.permutation(n_rows)
    out: dict[str, Any] = {}
    for name, field in source.fields.items():
        if field.is_ragged:
            offsets = np.cumsum([0, *source.stored_lengths[name][np.argsort(places)]]).astype(np.int32)
            out[name] = RaggedArray(np.zeros((offsets[-1], *field.shape), field.dtype), offsets)
        else:
            out[name] = np.zeros((n_rows, *field.shape), field.dtype)
    cuts = np.unique([0, *stops, *rng.integers(0, n_rows, len(stops))])
    for start, stop in pairwise(cuts.tolist()):
        source.read(PLAN, reads_of((start, places[start:stop])), out)
    return {name: _in_order(column, places) for name, column in out.items()}


def _in_order(column: np.ndarray | RaggedArray, places: np.ndarray) -> np.ndarray | RaggedArray:
    if not isinstance(column, RaggedArray):
        return column[places]
    lengths = np.diff(column.offsets)[places]
    return RaggedArray(column.values[column.places(places)], np.cumsum([0, *lengths]))


def read_by_jobs(source: HDF5Dataset, row_ids: np.ndarray, n_rows: int = 13) -> dict[str, Any]:
    """The rows `row_ids` of dense fields, read by jobs of `n_rows` rows each, as the feed makes them."""
    reads = reads_of(*[(row, np.array([place])) for place, row in enumerate(row_ids.tolist())])
    out = {name: np.zeros((len(row_ids), *field.shape), field.dtype) for name, field in source.fields.items()}
    plan = PLAN._replace(n_rows=len(row_ids), reads=reads)
    jobs = source.gathers(plan, out, n_rows)
    for job in jobs or [partial(source.read, plan, part, out) for part in reads.split(n_rows)]:
        job()
    return out
