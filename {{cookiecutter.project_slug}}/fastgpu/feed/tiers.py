"""Where rows live, and the pools of an epoch from there: all three tiers give the same batches, bit for bit."""

from collections.abc import Iterator
from itertools import count
from typing import Literal, Protocol

import numpy as np
import torch

from fastgpu.feed.prefetch import Prefetcher, Supplier
from fastgpu.process.launch import UserError
from fastgpu.rows.contract import Pool, PoolPlan, Source
from fastgpu.rows.field import MOST_VALUES
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.rows import Rows
from fastgpu.storage.arrays import Arrays
from fastgpu.storage.dataset import DatasetRows, Loading

Tier = Literal["device", "host", "disk"]
LOAD_BYTES = 64 << 20  # a step of loading the device or host tier


class Readable(Source, Supplier, Protocol):
    """Rows that any thread may read: a `Store`, `Arrays`, `ImageFiles`."""


class Feed(Protocol):
    """An epoch at a time, pool after pool."""

    def pools(self, epoch: int, consumed: int = 0) -> Iterator[Pool]:
        """The pools of an epoch, from `consumed` rows (over all ranks) on."""

    def supply_s(self) -> float:
        """Seconds it took to read a row of this rank, in the mean since last asked; 0 where none is read."""

    def close(self) -> None:
        """End the threads."""


def make_feed(
    rows: Readable | DatasetRows,
    order: BlockSampler,
    tier: Tier,
    device: torch.device,
    readers: int,
    prefetch_pools: int = 2,
    pin_memory: bool = True,
) -> Feed:
    """The rows in the order of `order`, living on `tier`, as pools on `device`.

    readers: threads for the rows of files, worker processes (0: none) for those of a Dataset. pin_memory: page-lock the
    staging memory, without which copies to a GPU do not overlap with its work.
    """
    if tier == "device":
        resident = _read_all(rows, device, readers, pin_memory)
        pool = Rows.empty(rows.fields, _pool_rows(order), device, values=_pool_values(rows, order))
        return ResidentFeed(resident, order, pool)
    if tier == "host":
        columns = _read_all(rows, torch.device("cpu"), readers, pin_memory=False).numpy()
        below = {name: field.below for name, field in rows.fields.items()}
        rows, readers = Arrays(rows.name, columns, rows.attributes, rows.block_rows, below), max(1, readers)
    return _stream(rows, order, device, readers, prefetch_pools + 1, pin_memory)


class ResidentFeed:
    """All rows live on the device; a pool is one gather there. An epoch touches neither disk nor host."""

    def __init__(self, rows: Rows, order: BlockSampler, pool: Rows):
        """pool: memory for the largest one; one is enough: kernels that fill and use it queue up in order."""
        self._rows, self._order, self._pool = rows, order, pool

    def pools(self, epoch: int, consumed: int = 0) -> Iterator[Pool]:
        for plan in self._order.pools(epoch, consumed):
            rows = self._rows.take(torch.from_numpy(self._order.row_numbers(plan)), out=self._pool)
            yield Pool(plan, rows.slice(plan.skip_rows, plan.rows))

    def supply_s(self) -> float:
        return 0.0

    def close(self) -> None:
        pass


class StreamedFeed:
    """Pools read ahead of the loop; the next epoch's first ones are read while this epoch ends."""

    def __init__(self, order: BlockSampler | Loading, prefetcher: Prefetcher):
        self._order, self._prefetcher = order, prefetcher
        self._next: tuple[int, int] | None = None  # (epoch, consumed) of what is being read now
        self._pools: Iterator[tuple[PoolPlan, Rows]] = iter(())

    def pools(self, epoch: int, consumed: int = 0) -> Iterator[Pool]:
        if consumed == self._order.total_size:
            return
        if self._next != (epoch, consumed):
            self._prefetcher.start(self._plans(epoch, consumed))
            self._pools = iter(self._prefetcher)
        self._next = None  # until this epoch has been taken to its end
        for plan, rows in self._pools:
            yield Pool(plan, rows.slice(plan.skip_rows, plan.rows))
            if plan.is_last:
                self._next = (epoch + 1, 0)
                return

    def _plans(self, epoch: int, consumed: int) -> Iterator[PoolPlan]:
        yield from self._order.pools(epoch, consumed)
        for later in count(epoch + 1):
            yield from self._order.pools(later)

    def supply_s(self) -> float:
        return self._prefetcher.supply_s()

    def close(self) -> None:
        self._prefetcher.close()
        if isinstance(self._order, Loading):
            self._order.close()


def _stream(
    rows: Readable | DatasetRows, order: BlockSampler, device: torch.device, readers: int, slots: int, pin_memory: bool
) -> StreamedFeed:
    if isinstance(rows, DatasetRows):
        loading = Loading(rows, order, readers)
        return StreamedFeed(loading, Prefetcher(loading, _pool_rows(order), device, 1, slots, pin_memory))
    sizes = (_pool_rows(order), device, readers, slots, pin_memory, _pool_values(rows, order))
    return StreamedFeed(order, Prefetcher(rows, *sizes))


def _pool_rows(order: BlockSampler) -> int:
    """Rows of the largest pool of one rank."""
    return min(order.pool_batches * order.batch_rows, len(order))


def _pool_values(rows: Readable | DatasetRows, order: BlockSampler) -> dict[str, int]:
    """Of ragged fields: values of the fullest pool of one rank."""
    found = {name: order.most_values(lengths) for name, lengths in rows.lengths.items()}
    if max(found.values(), default=0) > MOST_VALUES:
        raise UserError(
            f"data.pool_batches is {order.pool_batches}: a pool of {rows.name} may have {max(found.values()):,} values "
            f"and at most {MOST_VALUES:,} fit; use fewer"
        )
    return found


def _read_all(source: Readable | DatasetRows, device: torch.device, readers: int, pin_memory: bool) -> Rows:
    """Every row in file order, through the same readers and copy stream: the host holds 128 MiB at most."""
    values = {name: int(lengths.sum(dtype=np.int64)) for name, lengths in source.lengths.items()}
    if max(values.values(), default=0) > MOST_VALUES:
        most = max(values.values())
        raise UserError(f"{source.name} has {most:,} values, and at most {MOST_VALUES:,} fit the device or host tier; "
                        "use data.tier=disk")  # fmt: skip
    batch_rows = min(len(source), max(1, LOAD_BYTES // source.row_bytes))
    order = BlockSampler(source.block_rows, batch_rows, shuffle=False, drop_last=False)
    feed = _stream(source, order, device, readers, 2, pin_memory)
    rows, start = Rows.empty(source.fields, len(source), device, values=values), 0
    for name, lengths in source.lengths.items():
        np.cumsum(lengths, out=rows[name].host[1:])
        rows[name].offsets.copy_(torch.from_numpy(rows[name].host))
    for plan, part in feed.pools(0):
        rows.slice(start, start + plan.real_rows).copy_(part.slice(0, plan.real_rows))
        start += plan.real_rows
    feed.close()
    return rows
