"""Where rows live, and the pools of an epoch from there: all three tiers give the same batches, bit for bit."""

from collections.abc import Iterator, Mapping
from itertools import count
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch

from .order import BlockSampler, PoolPlan
from .prefetch import Prefetcher
from .rows import Dense
from .store import Store

Tier = Literal["device", "host", "disk"]
LOAD_BYTES = 64 << 20  # a step of loading the device or host tier


class Pool(NamedTuple):
    """Rows of one rank on the device, in training order; valid until the next pool is asked for."""

    plan: PoolPlan
    rows: Dense


class Feed(Protocol):
    """An epoch at a time, pool after pool."""

    def pools(self, epoch: int, consumed: int = 0) -> Iterator[Pool]:
        """The pools of an epoch, from `consumed` rows (over all ranks) on."""

    def close(self) -> None:
        """End the threads."""


def make_feed(
    store: Store, order: BlockSampler, tier: Tier, device: torch.device, readers: int, prefetch_pools: int
) -> Feed:
    """The rows of `store` in the order of `order`, living on `tier`, as pools on `device`."""
    if tier == "device":
        return ResidentFeed(store, order, device, readers)
    read = store.read if tier == "disk" else _RowsInMemory(store, readers).read
    pool_rows = min(order.pool_batches * order.batch_rows, len(order))
    prefetcher = Prefetcher(read, store.fields, pool_rows, device, readers, prefetch_pools + 1)
    return StreamedFeed(order, prefetcher)


class ResidentFeed:
    """All rows live on the device; a pool is one gather there. An epoch touches neither disk nor host."""

    def __init__(self, store: Store, order: BlockSampler, device: torch.device, readers: int):
        self._order, self._device, self._rows = order, device, _read_all(store, device, readers)

    def pools(self, epoch: int, consumed: int = 0) -> Iterator[Pool]:
        for plan in self._order.pools(epoch, consumed):
            index = torch.from_numpy(self._order.row_numbers(plan)).to(self._device, non_blocking=True)
            yield Pool(plan, self._rows.take(index).slice(plan.skip_rows, plan.rows))

    def close(self) -> None:
        pass


class StreamedFeed:
    """Pools read ahead of the loop; the next epoch's first ones are read while this epoch ends."""

    def __init__(self, order: BlockSampler, prefetcher: Prefetcher):
        self._order, self._prefetcher = order, prefetcher
        self._next: tuple[int, int] | None = None  # (epoch, consumed) of what is being read now
        self._pools: Iterator[tuple[PoolPlan, Dense]] = iter(())

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

    def close(self) -> None:
        self._prefetcher.close()


class _RowsInMemory:
    """A store whose rows have been read: the host tier."""

    def __init__(self, store: Store, readers: int):
        self._arrays = _read_all(store, torch.device("cpu"), readers).numpy()
        self._block_first = np.cumsum(store.block_rows) - store.block_rows

    def read(self, block: int, first: int, places: np.ndarray, out: Mapping[str, np.ndarray]) -> None:
        start = self._block_first[block] + first
        for name, array in self._arrays.items():
            out[name][places] = array[start : start + len(places)]


def _read_all(store: Store, device: torch.device, readers: int) -> Dense:
    """Every row in file order, through the same readers and copy stream: the host holds 128 MiB at most."""
    order = BlockSampler(store.block_rows, max(1, LOAD_BYTES // store.row_bytes), shuffle=False, drop_last=False)
    prefetcher = Prefetcher(store.read, store.fields, min(order.batch_rows, len(store)), device, readers, slots=2)
    rows, start = Dense.empty(store.fields, len(store), device), 0
    prefetcher.start(order.pools(0))
    for plan, part in prefetcher:
        rows.slice(start, start + plan.rows).copy_(part)
        start += plan.rows
    prefetcher.close()
    return rows
