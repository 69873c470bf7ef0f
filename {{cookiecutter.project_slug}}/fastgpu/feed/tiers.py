"""Pools of an epoch from the device, the host or the disk: all three tiers give the same batches, bit for bit."""

from collections.abc import Iterator
from contextlib import closing
from itertools import count
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from fastgpu.feed.prefetch import Capacity, Prefetcher
from fastgpu.feed.sizes import Sizes
from fastgpu.process.config import Loader, Tier
from fastgpu.process.launch import UserError
from fastgpu.process.world import World
from fastgpu.rows.contract import Pool, PoolPlan, Source
from fastgpu.rows.order import BlockSampler, Shard
from fastgpu.rows.rows import MAX_VALUES, Rows
from fastgpu.rows.selection import MixedSampler
from fastgpu.storage.arrays import Arrays

LOAD_BYTES = 64 << 20
"""Bytes of one step of filling the device or host tier."""
LOAD_BATCHES = 16
"""A step is so many batches: the worker processes of a Dataset make a batch each."""


class Placement(NamedTuple):
    """Where rows are kept and who reads them."""

    tier: Tier
    device: torch.device
    n_readers: int
    """Threads that read files, or worker processes (0: none) that read a Dataset."""


class Feed(Protocol):
    """Gives the pools of one epoch after the other."""

    order: BlockSampler

    def pools(self, epoch: int, consumed: int = 0) -> Iterator[Pool]:
        """The pools of an epoch, beginning after `consumed` rows (of all ranks together)."""

    def close(self) -> None:
        """End the threads."""


def make_order(source: Source, sizes: Sizes, world: World, seed: int | None) -> BlockSampler:
    """The order of the rows of this rank. seed: None keeps the order of the file and leaves out no row (validation)."""
    is_shuffled = seed is not None
    canonical_ranks = sizes.canonical_ranks if is_shuffled else None
    shard = Shard(world.rank, world.world_size, canonical_ranks)
    options: dict[str, Any] = {"shard": shard, "pool_batches": sizes.pool_batches, "seed": seed}
    if source.mixture and is_shuffled:
        return MixedSampler(source.mixture, source.block_rows, sizes.batch_size, **options)
    return BlockSampler(source.block_rows, sizes.batch_size, drop_last=is_shuffled, **options)


def open_feed(source: Source, order: BlockSampler, sizes: Sizes, world: World, *, loader: Loader) -> Feed:
    """The feed of a training run. Raises UserError on every rank if the rows cannot be read or kept on one of them."""
    with world.raise_on_every_rank():
        return make_feed(source, order, Placement(sizes.tier, world.device, sizes.n_readers), loader)


def make_feed(source: Source, order: BlockSampler, placement: Placement, loader: Loader | None = None) -> Feed:
    """The rows of `source` in the given order, kept on a tier, as pools on a device.

    loader: prefetch_pools and timeout_s are used; the numbers of readers come from `placement`.
    """
    loader = loader or Loader()
    tier, device, n_readers = placement
    if tier == "device":
        resident = _read_all(source, placement, loader)
        capacity = pool_capacity(source, order)
        pool = Rows.empty(source.fields, capacity.n_rows, device, n_values=capacity.values)
        return ResidentFeed(resident, order, pool)
    if tier == "host":
        stored = source.stored
        columns = _read_all(stored, placement._replace(device=torch.device("cpu")), loader).numpy()
        n_items = {name: field.n_items for name, field in stored.fields.items()}
        arrays = Arrays(stored.name, columns, stored.attributes, block_rows=stored.block_rows, n_items=n_items)
        source = source.over(arrays)
        n_readers = max(1, n_readers)
    return StreamedFeed(source, order, placement._replace(n_readers=n_readers), loader)


class ResidentFeed:
    """All rows are on the device and a pool is one gather there. An epoch touches neither disk nor host memory."""

    def __init__(self, rows: Rows, order: BlockSampler, pool: Rows):
        """pool: memory for the largest pool. One is enough: kernels that fill and use it run in order."""
        self.order = order
        self._rows = rows
        self._pool = pool

    def pools(self, epoch: int, consumed: int = 0) -> Iterator[Pool]:
        for plan in self.order.pools(epoch, consumed):
            rows = self._rows.take(torch.from_numpy(self.order.row_ids(plan)), out=self._pool)
            yield Pool(plan, rows.slice(plan.n_skipped_rows, plan.n_rows))

    def close(self) -> None:
        """Nothing to end."""


class StreamedFeed:
    """Pools are read ahead of the loop. The first pools of the next epoch are read while this epoch ends."""

    def __init__(self, source: Source, order: BlockSampler, placement: Placement, loader: Loader):
        self.order = order
        self._reader = source.open_reader(order, placement.n_readers)
        capacity = pool_capacity(source, order)
        self._prefetcher = Prefetcher(source, self._reader, capacity, placement.device, loader=loader)
        self._next: tuple[int, int] | None = None  # (epoch, consumed) of the pools that are being read now
        self._pools: Iterator[tuple[PoolPlan, Rows]] = iter(())

    def pools(self, epoch: int, consumed: int = 0) -> Iterator[Pool]:
        if consumed == self.order.total_size:
            return
        if self._next != (epoch, consumed):
            self._prefetcher.start(self._plans(epoch, consumed))
            self._pools = iter(self._prefetcher)
        self._next = None  # until all pools of this epoch have been taken
        for plan, rows in self._pools:
            yield Pool(plan, rows.slice(plan.n_skipped_rows, plan.n_rows))
            if plan.is_last:
                self._next = (epoch + 1, 0)
                return

    def _plans(self, epoch: int, consumed: int) -> Iterator[PoolPlan]:
        yield from self._reader.pools(epoch, consumed)
        for later in count(epoch + 1):
            yield from self._reader.pools(later)

    def close(self) -> None:
        self._prefetcher.close()
        self._reader.close()


def pool_capacity(source: Source, order: BlockSampler) -> Capacity:
    """The size of the largest pool of this rank. Raises UserError if its values exceed 32-bit offsets."""
    values = {name: order.max_values(lengths) for name, lengths in source.lengths.items()}
    most = max(values.values(), default=0)
    if most > MAX_VALUES:
        raise UserError(
            f"data.pool_batches is {order.pool_batches}: a pool of {source.name} may have {most:,} values and at most "
            f"{MAX_VALUES:,} fit; use fewer"
        )
    return Capacity(order.max_pool_rows, values)


def _read_all(source: Source, placement: Placement, loader: Loader) -> Rows:
    """Every row in the order of the file, through the same readers and copy stream.

    Besides the rows it takes 128 MiB of host memory, and for a Dataset the batches of its workers, of 4 MiB each.
    """
    n_values = {name: int(lengths.sum(dtype=np.int64)) for name, lengths in source.lengths.items()}
    most = max(n_values.values(), default=0)
    if most > MAX_VALUES:
        raise UserError(
            f"{source.name} has {most:,} values, and at most {MAX_VALUES:,} fit the device or host tier; use "
            "data.tier=disk"
        )
    batch_size = min(len(source), max(1, LOAD_BYTES // LOAD_BATCHES // source.row_bytes))
    order = BlockSampler(source.block_rows, batch_size, pool_batches=LOAD_BATCHES, seed=None, drop_last=False)
    rows = Rows.empty(source.fields, len(source), placement.device, n_values=n_values)
    for name, lengths in source.lengths.items():
        np.cumsum(lengths, out=rows[name].host_offsets[1:])
        rows[name].offsets.copy_(torch.from_numpy(rows[name].host_offsets))
    start = 0
    with closing(StreamedFeed(source, order, placement, loader.model_copy(update={"prefetch_pools": 1}))) as feed:
        for plan, part in feed.pools(0):
            rows.slice(start, start + plan.n_real_rows).copy_(part.slice(0, plan.n_real_rows))
            start += plan.n_real_rows
    return rows
