"""Rows that carry their own numbers, files and feeds of them, and plain ways to read them."""

from collections.abc import Iterable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from fastgpu.feed import PoolLoader, ResidentRows, open_loader
from fastgpu.process.config import Auto, Config, Tier
from fastgpu.rows.contract import Dataset, Reads
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.rows import Ragged, RaggedArray
from fastgpu.rows.selection import Runs
from fastgpu.storage.store import HDF5Dataset
from support.ranks import CPU

DENSE_FIELDS = {"images": "images", "labels": "labels"}
"""The fields of a file of `write_rows`."""
RAGGED_FIELDS = {"items": "items", "number": "number"}
"""The fields of a file of `write_ragged`."""
PLAN = next(BlockSampler(np.ones(1, np.int32), 1, seed=None).pools(0))
"""A plan that draws nothing at random, for rows that are read without a pool."""


def reads_of(*ranges: tuple[int, np.ndarray]) -> Reads:
    """Reads of neighbouring rows: (first row, their places)."""
    places = [places for _, places in ranges]
    runs = Runs(np.array([start for start, _ in ranges]), np.array([*map(len, places)]))
    return Reads(runs, np.concatenate(places))


def _rows_of(number: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    images = (number[:, None] * 7 + np.arange(int(np.prod(shape)))).astype(np.uint8)
    images[:, :4] = number.view(np.uint8).reshape(-1, 4)
    return images.reshape(len(number), *shape)


def numbered(rows: int, shape: tuple[int, ...] = (1, 4, 2), start: int = 0) -> np.ndarray:
    """uint8 rows (rows, *shape). Each begins with its number as four bytes; the rest is a function of the number."""
    return _rows_of(np.arange(start, start + rows, dtype="<u4"), shape)


def numbers_of(images: torch.Tensor | np.ndarray) -> list[int]:
    """The numbers that rows carry. Fails if any byte of a row is not the one that belongs to its number."""
    array = np.ascontiguousarray(np.asarray(images))
    number = array.reshape(len(array), -1)[:, :4].copy().view("<u4").reshape(-1)
    np.testing.assert_array_equal(array, _rows_of(number, array.shape[1:]))
    return number.tolist()


ITEMS = 1000
"""Number of items that the values of ragged rows are drawn from."""


def ragged(numbers: Iterable[int]) -> RaggedArray:
    """Ragged rows: row n has n * 7 % 5 items, each a function of n and its place."""
    rows = [np.arange(n * 7 % 5) * 31 + n for n in numbers]
    offsets = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    return RaggedArray((np.concatenate([*rows, []]) % ITEMS).astype(np.int32), offsets)


def is_ragged(rows: Ragged | RaggedArray, numbers: Iterable[int]) -> bool:
    """Whether these are the rows of those numbers, with offsets that agree on the host and on the device."""
    expected = ragged(numbers)
    on_host = rows.host_offsets if isinstance(rows, Ragged) else rows.offsets
    has_offsets = all(np.array_equal(offsets, expected.offsets) for offsets in (np.asarray(rows.offsets), on_host))
    return has_offsets and np.array_equal(np.asarray(rows.values)[: expected.offsets[-1]], expected.values)


def config_of(
    tier: Tier = "disk", n_readers: int | Auto = 2, *, echo: float = 1.0, n_epochs: int = 10**9, **loader: int
) -> Config:
    """A config that names a tier and the readers. loader: settings of `Loader`."""
    readers = {"num_readers": n_readers or 1, "num_workers": n_readers}
    data = {"train": "", "val": "", "fields": {}, "tier": tier, "pool_batches": 1, "echo": echo}
    sections = {"data": data, "loader": readers | loader, "train": {"epochs": n_epochs}}
    return Config.model_validate({"workload": "minimal", **sections})


def open_feed(
    source: Dataset,
    sampler: BlockSampler,
    tier: Tier = "disk",
    n_readers: int | Auto = 2,
    *,
    device: torch.device = CPU,
    **options: Any,
) -> PoolLoader:
    """The rows of a source in the given order. options: of `config_of`."""
    config = config_of(tier, n_readers, **options)
    return open_loader(source, sampler, ResidentRows([source], config, device), config)


def rows_before(sampler: BlockSampler, pool: int) -> int:
    """Rows of an epoch that all ranks together take before that pool."""
    return min(pool * sampler.pool_batches * sampler.global_batch_size, sampler.total_size)


def write_rows(
    path: Path,
    rows: int = 100,
    shape: tuple[int, ...] = (1, 4, 2),
    chunk: int | None = 8,
    *,
    start: int = 0,
    classes: int = 4,
    **options: Any,
) -> str:
    """Write an HDF5 file with numbered `images`, and `labels`. Returns its path. options: of the images."""
    with h5py.File(path, "w") as file:
        chunks = (min(chunk, rows), *shape) if chunk else None
        file.create_dataset("images", data=numbered(rows, shape, start), chunks=chunks, **options)
        file["labels"] = np.arange(start, start + rows) % classes
    return str(path)


def write_ragged(path: Path, rows: int = 100, start: int = 0, *, items: int = ITEMS, **options: Any) -> str:
    """Write an HDF5 file with the CSR matrix `items` and the `number` of each row. Returns its path."""
    array = ragged(range(start, start + rows))
    with h5py.File(path, "w") as file:
        group = file.create_group("items")
        group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": (rows, items)})
        group["indptr"] = array.offsets
        group.create_dataset("indices", data=array.values, **options)
        file["number"] = np.arange(start, start + rows)
    return str(path)


def read_rows(source: Dataset) -> dict[str, Any]:
    """All rows of a source, read as pools are filled: in parts of blocks, each row to a shuffled place.

    Returns {field: array or RaggedArray}, in the order of the source again.
    """
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
    plan = PLAN._replace(reads=reads)
    jobs = source.gathers(plan, out, n_rows)
    for job in jobs or [partial(source.read, plan, part, out) for part in reads.split(n_rows)]:
        job()
    return out
