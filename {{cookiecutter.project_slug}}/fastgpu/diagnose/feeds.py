"""The feed of a run, and two feeds that leave a part of its work out, so that the other part can be timed.

real     reads, copies and shuffles as the run does
cached   reads the same few blocks again and again, so the storage takes no part in it
staged   copies pools to the device from staging memory that is filled already, so nobody reads
"""

from collections.abc import Iterable, Mapping
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import torch

from fastgpu.feed.tiers import Feed, Placement, make_feed
from fastgpu.process.config import Loader
from fastgpu.rows.contract import BlockRead, PoolReader, Source
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.rows import Rows
from fastgpu.storage.arrays import Arrays
from fastgpu.storage.dataset import DatasetSource

CPU = torch.device("cpu")


class Feeds(NamedTuple):
    """The feeds to measure. None: the feed does not exist on this tier or device."""

    real: Feed
    staged: Feed | None = None
    cached: Feed | None = None
    n_ready_pools: int = 0
    """Pools that lie ready when a feed has rested. They are taken before a measurement begins."""
    n_cached_pools: int = 0
    """Pools of `cached` until each of its blocks has been read once."""
    n_joint_pools: int = 1
    """Pools that may arrive at the same time, because as many worker processes started at the same time."""

    def close(self) -> None:
        """End the threads of all feeds."""
        for feed in (self.real, self.staged, self.cached):
            if feed:
                feed.close()


def open_real_feed(source: Source, order: BlockSampler, placement: Placement, loader: Loader) -> Feeds:
    """The feed of a run, alone."""
    real = make_feed(source, order, placement, loader)
    if placement.tier == "device":
        return Feeds(real)
    n_ready_pools = loader.prefetch_pools + 1
    n_joint_pools = 1
    if isinstance(source, DatasetSource):  # its workers hold batches ready, too
        n_ready_pools += ceil(placement.n_readers * loader.prefetch_factor / order.pool_batches)
        n_joint_pools = max(1, ceil(placement.n_readers / order.pool_batches))
    return Feeds(real, n_ready_pools=n_ready_pools, n_joint_pools=n_joint_pools)


def open_feeds(source: Source, order: BlockSampler, placement: Placement, loader: Loader) -> Feeds:
    """The feed of a run and, if the rows are streamed, those that leave a part of the work out."""
    feeds = open_real_feed(source, order, placement, loader)
    if placement.tier == "disk":
        few = _head(source, order)
        few_order = _same_order(order, few.block_rows, order.pool_batches)
        cached = make_feed(few, few_order, placement, loader)
        feeds = feeds._replace(cached=cached, n_cached_pools=few_order.pools_per_epoch)
    if placement.tier != "device" and placement.device.type == "cuda":
        feeds = feeds._replace(staged=_open_staged(source, order, placement, loader))
    return feeds


def read_batch(source: Source, order: BlockSampler, n_readers: int) -> Rows:
    """One batch of this rank on the host, in memory of its own."""
    order = _same_order(order, source.block_rows, 1)
    return _read_pool(source, order, n_readers)


class Head(Source):
    """The first blocks of another source."""

    def __init__(self, source: Source, n_blocks: int):
        self._source = source
        self.name = source.name
        self.fields = source.fields
        self.attributes = source.attributes
        self.filters = source.filters
        self.by_h5py = source.by_h5py
        self.block_rows = source.block_rows[:n_blocks]
        self.lengths = {name: lengths[: len(self)] for name, lengths in source.lengths.items()}

    def __len__(self) -> int:
        return int(self.block_rows.sum())

    def column(self, name: str) -> np.ndarray:
        return self._source.column(name)[: len(self)]

    def read(self, reads: Iterable[BlockRead], out: Mapping[str, Any]) -> None:
        self._source.read(reads, out)

    def open_reader(self, order: BlockSampler, n_readers: int) -> PoolReader:
        return self._source.open_reader(order, n_readers)


def _head(source: Source, order: BlockSampler) -> Head:
    """The fewest blocks with two pools for all ranks, and a block for each canonical rank."""
    need = 2 * order.pool_batches * order.global_batch_size
    n_blocks = int(np.searchsorted(np.cumsum(source.block_rows), need)) + 1
    return Head(source, max(order.canonical_ranks, n_blocks))


class _FilledOnce(Arrays):
    """The rows of one pool. Each slot of a feed gets them once; afterwards they lie in its staging memory already."""

    def __init__(self, pool: Rows, source: Source, n_slots: int):
        columns = {name: column.numpy() for name, column in pool.columns.items()}
        n_items = {name: field.n_items for name, field in source.fields.items()}
        block_rows = np.array([len(pool)], np.int32)
        super().__init__("staged", columns, block_rows=block_rows, n_items=n_items)
        self._n_rows_left = n_slots * len(pool)

    def read(self, reads: Iterable[BlockRead], out: Mapping[str, Any]) -> None:
        if self._n_rows_left <= 0:
            return
        for read in reads:
            self._n_rows_left -= len(read.places)
            super().read([read], out)


def _open_staged(source: Source, order: BlockSampler, placement: Placement, loader: Loader) -> Feed:
    pool = _read_pool(source, order, placement.n_readers)
    filled = _FilledOnce(pool, source, n_slots=loader.prefetch_pools + 1)
    filled_order = BlockSampler(filled.block_rows, order.batch_size, pool_batches=order.pool_batches, seed=None)
    return make_feed(filled, filled_order, Placement("disk", placement.device, 1), loader)


def _read_pool(source: Source, order: BlockSampler, n_readers: int) -> Rows:
    """The first pool of epoch 0 on the host, in memory of its own, without gaps between ragged values."""
    feed = make_feed(source, order, Placement("disk", CPU, n_readers), Loader(prefetch_pools=1))
    rows = next(feed.pools(0)).rows
    pool = rows.take(torch.arange(len(rows)))
    feed.close()
    return pool


def _same_order(order: BlockSampler, block_rows: np.ndarray, pool_batches: int) -> BlockSampler:
    """The same kind of order over other blocks."""
    return BlockSampler(block_rows, order.batch_size, shard=order.shard, pool_batches=pool_batches, seed=order.seed)
