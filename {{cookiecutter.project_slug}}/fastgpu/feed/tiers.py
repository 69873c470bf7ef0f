"""Pools of an epoch from the device, the host or the disk: all three tiers give the same batches, bit for bit."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import NamedTuple

import numpy as np
import torch

from fastgpu.dataset.source import ItemDataset
from fastgpu.feed.prefetch import PrefetchLoader
from fastgpu.feed.sizes import Sizes
from fastgpu.process.config import Loader, Tier
from fastgpu.process.launch import UserError
from fastgpu.rows.contract import Dataset, Pool
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.rows import MAX_VALUES, Rows
from fastgpu.storage.arrays import ArrayDataset

LOAD_BYTES = 64 << 20
"""Bytes of one step of filling the device or host tier."""
LOAD_BATCHES = 16
"""A step is so many batches: a worker process of a Dataset is asked for one at a time."""


class Placement(NamedTuple):
    """Where rows are kept and who reads them."""

    tier: Tier
    device: torch.device
    n_readers: int
    """Threads that read files, or worker processes (0: none) that read a Dataset."""


class ResidentLoader:
    """All rows are on the device and a pool is one gather there. An epoch touches neither disk nor host memory."""

    def __init__(self, rows: Rows, source: Dataset, order: BlockSampler):
        """rows: those of `source`, on the device."""
        self.order = order
        self._rows = rows
        self._lengths = source.lengths
        # Memory for one pool is enough: kernels that fill and use it run in order.
        self._pool = Rows.empty(source.fields, order.max_pool_rows, rows.device)

    def pools(self, epoch: int, first_pool: int = 0) -> Iterator[Pool]:
        for plan in self.order.pools(epoch, first_pool):
            row_ids = plan.row_ids
            for name, lengths in self._lengths.items():
                self._pool.make_room(name, int(lengths[row_ids].sum(dtype=np.int64)))
            yield Pool(plan, self._rows.take(torch.from_numpy(row_ids), out=self._pool))

    def close(self) -> None:
        """Nothing to end."""


Feed = PrefetchLoader | ResidentLoader
"""Gives the pools of one epoch after the other: see `PrefetchLoader.pools`."""


def open_loaders(
    sources: Sequence[Dataset], orders: Sequence[BlockSampler], sizes: Sizes, device: torch.device, *, loader: Loader
) -> list[Feed]:
    """The loaders of a training run. Raises UserError if the rows cannot be read or kept."""
    placement = Placement(sizes.tier, device, sizes.n_readers)
    kept: dict[int, Rows] = {}
    return [
        make_feed(source, order, placement, loader, kept=kept) for source, order in zip(sources, orders, strict=True)
    ]


def make_feed(
    source: Dataset,
    order: BlockSampler,
    placement: Placement,
    loader: Loader | None = None,
    *,
    kept: dict[int, Rows] | None = None,
) -> Feed:
    """The rows of `source` in the given order, kept on a tier, as pools on a device.

    loader: prefetch_pools and timeout_s are used; the numbers of readers come from `placement`. kept: all rows that
    are in memory for other feeds, by the `id` of their block_rows, which the parts of a split share; those of this one
    are added.
    """
    loader = loader or Loader()
    kept = {} if kept is None else kept
    tier, device, n_readers = placement
    if tier == "disk":
        return _prefetch(source, order, placement, loader)
    key = id(source.block_rows)
    if key not in kept:
        home = placement if tier == "device" else placement._replace(device=torch.device("cpu"))
        kept[key] = _read_all(source, home, loader)
    if tier == "device":
        return ResidentLoader(kept[key], source, order)
    rows: Dataset = ArrayDataset(
        source.name, kept[key].numpy(), source.attributes, block_rows=source.block_rows, fields=source.fields
    )
    return _prefetch(rows, order, placement._replace(n_readers=max(1, n_readers)), loader)


def _prefetch(source: Dataset, order: BlockSampler, placement: Placement, loader: Loader) -> PrefetchLoader:
    """Rows that are read ahead: by threads, or by the worker processes of a Dataset."""
    n_threads = placement.n_readers
    if isinstance(source, ItemDataset):
        source = source.with_workers(placement.n_readers, order)
        n_threads = 1
    return PrefetchLoader(source, order, placement.device, n_threads, loader=loader)


def _read_all(source: Dataset, placement: Placement, loader: Loader) -> Rows:
    """Every row, selected or not, in the order of the file, through the same readers and copy stream.

    Besides the rows it takes 128 MiB of host memory, and for a Dataset the answers of its workers, of 4 MiB each.
    """
    for name, field in source.fields.items():
        if field.is_ragged and name not in source.lengths:
            raise UserError(
                f"data.tier is {placement.tier}, but nobody knows how many values {name} of {source.name} have before "
                "they are read; use data.tier=disk, or write them to a file: python convert.py dataset"
            )
    n_values = {name: int(lengths.sum(dtype=np.int64)) for name, lengths in source.lengths.items()}
    most = max(n_values.values(), default=0)
    if most > MAX_VALUES:
        raise UserError(
            f"{source.name} has {most:,} values, and at most {MAX_VALUES:,} fit the device or host tier; use "
            "data.tier=disk"
        )
    n_rows = int(source.block_rows.sum())
    batch_size = min(n_rows, max(1, LOAD_BYTES // LOAD_BATCHES // source.row_bytes))
    order = BlockSampler(source.block_rows, batch_size, pool_batches=LOAD_BATCHES, seed=None, drop_last=False)
    order.n_epochs = 1
    rows = Rows.empty(source.fields, n_rows, placement.device, n_values=n_values)
    for name, lengths in source.lengths.items():
        np.cumsum(lengths, out=rows[name].host_offsets[1:])
        rows[name].offsets.copy_(torch.from_numpy(rows[name].host_offsets))
    start = 0
    with closing(_prefetch(source, order, placement, loader.model_copy(update={"prefetch_pools": 1}))) as feed:
        for plan, part in feed.pools(0):
            rows.slice(start, start + plan.n_real_rows).copy_(part.slice(0, plan.n_real_rows))
            start += plan.n_real_rows
    return rows
