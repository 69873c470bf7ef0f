"""How fast could each part of the loop be without the others? Measured, for bottleneck.py to judge.

    compute    transform and step on one batch that stays on the device
    copy       the same on pools that come from staging memory, which nobody has to fill
    supply     the feed, without a step behind it
    cached     the feed of a few blocks again and again, so from the page cache
    loop       the training loop itself

Each is measured in turn, in each of several rounds, by all ranks at once; ranks agree on how many steps and pools that
is, so that those which share gradients never wait for one that has stopped.
"""

import copy
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import count
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import psutil
import torch

from fastgpu.diagnose.verdict import Measured, Timing
from fastgpu.feed.echo import echo, echo_passes
from fastgpu.feed.sizes import Sizes
from fastgpu.feed.tiers import Feed, make_feed
from fastgpu.process.machine import available_cpus
from fastgpu.process.world import World
from fastgpu.rows.contract import BlockRead, Pool
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.rows import Rows
from fastgpu.storage.arrays import Arrays

ROUNDS = 5
REFILL_S = 2.0  # to wait at most until a feed has read ahead what it may
STEPS = ("compute", "bare", "alone")  # measured in steps; the others in pools
WATCHED_STEPS = 10  # of a profile


class Device(Protocol):
    """What measuring needs of a device."""

    def synchronize(self) -> None:
        """Wait for all that is queued."""

    def busy_s(self, work: Callable[[], object]) -> float | None:
        """Seconds in which the device worked, while `work` ran; None: it cannot be told from the host's."""

    def syncs(self, work: Callable[[], object]) -> list[str]:
        """Where `work` made the host wait for the device: `file.py:12`."""


class TorchDevice:
    """A GPU, or a CPU, which is the host itself."""

    def __init__(self, device: torch.device):
        self._device, self._is_gpu = device, device.type == "cuda"

    def synchronize(self) -> None:
        if self._is_gpu:
            torch.cuda.synchronize(self._device)

    def busy_s(self, work: Callable[[], object]) -> float | None:
        if not self._is_gpu:
            return None
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            work()
            self.synchronize()
        kernels_us = (
            each.time_range.elapsed_us()
            for each in profile.events()
            if each.device_type == torch.autograd.DeviceType.CUDA
            and not each.is_user_annotation
            and not each.name.startswith("Mem")
        )
        return sum(kernels_us) / 1e6 or None  # none is seen where a container forbids profiling

    def syncs(self, work: Callable[[], object]) -> list[str]:
        if not self._is_gpu:
            return []
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                work()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        places = (
            f"{_short(each.filename)}:{each.lineno}" for each in found if "called a synchronizing" in str(each.message)
        )
        return list(dict.fromkeys(places))


class Parts(NamedTuple):
    """What the loop does with a batch."""

    transform: Callable[[Rows], Rows]
    step: Callable[[Rows], object]
    """Shares gradients with the other ranks."""
    alone: Callable[[Rows], object]
    """The same, without them."""
    batch_size: int
    """Of this rank."""
    echo: float = 1.0


class Feeds(NamedTuple):
    """Where pools come from; None: there is no such thing on this tier."""

    real: Feed
    staged: Feed | None = None
    cached: Feed | None = None
    ahead: int = 3
    """Pools that lie ready when a feed was not asked for a while: they are taken before time counts."""
    cached_pools: int = 0
    """Of `cached`, until all its blocks have been read once."""
    burst: int = 1
    """Pools that may come at once, since as many workers began at once."""

    def close(self) -> None:
        """End their threads."""
        for feed in (self.real, self.staged, self.cached):
            if feed:
                feed.close()


def make_feeds(
    rows: Any,
    order: BlockSampler,
    sizes: Sizes,
    device: torch.device,
    prefetch_pools: int,
    pins: bool,
    only_real: bool = False,
) -> Feeds:
    """The feed of a run with these sizes, and where rows are streamed the two that leave something out."""
    where = (device, sizes.readers, prefetch_pools, pins)
    real = make_feed(rows, order, sizes.tier, *where)
    if sizes.tier == "device":
        return Feeds(real, ahead=0)
    ahead, burst = prefetch_pools + 1, 1
    if rows.in_workers:
        ahead += ceil(sizes.readers * rows.options.prefetch_factor / order.pool_batches)
        burst = max(1, ceil(sizes.readers / order.pool_batches))
    if only_real:
        return Feeds(real, ahead=ahead, burst=burst)
    few = copy.copy(rows)  # its first blocks: at least two pools, and a block for each lane
    need = 2 * order.pool_batches * order.global_batch_size
    blocks = max(order.canonical_ranks, int(np.searchsorted(np.cumsum(rows.block_rows), need)) + 1)
    few.block_rows = rows.block_rows[:blocks]
    few_rows = int(few.block_rows.sum())
    few.lengths = {name: lengths[:few_rows] for name, lengths in rows.lengths.items()}
    few_order = _like(order, few.block_rows, order.pool_batches)
    cached = make_feed(few, few_order, "disk", *where) if sizes.tier == "disk" else None
    staged = _staged(rows, order, sizes, where) if device.type == "cuda" else None
    return Feeds(real, staged, cached, ahead, few_order.pools_per_epoch, burst)


def _like(order: BlockSampler, block_rows: np.ndarray, pool_batches: int) -> BlockSampler:
    return BlockSampler(
        block_rows,
        order.batch_size,
        rank=order.rank,
        world_size=order.num_replicas,
        canonical_ranks=order.canonical_ranks,
        pool_batches=pool_batches,
        seed=order.seed,
    )


class _Staged(Arrays):
    """One pool's rows, given to each slot once; from then on they lie in the staging memory already."""

    def __init__(self, pool: Rows, fields: dict[str, Any], slots: int):
        columns = {name: column.numpy() for name, column in pool.columns.items()}
        n_items = {name: field.n_items for name, field in fields.items()}
        super().__init__("staged", columns, None, np.array([len(pool)], np.int32), n_items)
        self._fills_left = slots * len(pool)

    def read(self, reads: Any, out: Any) -> None:
        listed: list[BlockRead] = list(reads)
        if self._fills_left > 0:
            self._fills_left -= sum(len(read.places) for read in listed)
            super().read(listed, out)


def _staged(rows: Any, order: BlockSampler, sizes: Sizes, where: tuple[torch.device, int, int, bool]) -> Feed:
    device, readers, prefetch_pools, pins = where
    source = make_feed(rows, order, "disk", torch.device("cpu"), readers, 1)
    pool = _copied(next(source.pools(0)).rows)
    source.close()
    staged = _Staged(pool, rows.fields, prefetch_pools + 1)
    mine = BlockSampler(staged.block_rows, order.batch_size, pool_batches=order.pool_batches, shuffle=False)
    return make_feed(staged, mine, "disk", device, 1, prefetch_pools, pins)


def _copied(rows: Rows) -> Rows:
    """The same rows in memory of their own, values of ragged ones without gaps."""
    return rows.take(torch.arange(len(rows)))


def first_batch(rows: Any, order: BlockSampler, readers: int, device: torch.device) -> Rows:
    """One batch of this rank that stays on the device."""
    feed = make_feed(rows, _like(order, rows.block_rows, 1), "disk", torch.device("cpu"), readers, 1)
    batch = _copied(next(feed.pools(0)).rows)
    feed.close()
    return batch.to(device)


# ---------------------------------------------------------------------------------------------- the measurements


def time_of(world: World, device: Device, work: Callable[[int], int], units: int) -> list[float]:
    """Seconds a step of each rank; all begin together. work: (units) -> steps."""
    device.synchronize()
    world.all_reduce_max(0.0)
    t0 = time.perf_counter()
    steps = work(units)
    device.synchronize()
    return world.all_gather((time.perf_counter() - t0) / steps)


def units_for(world: World, device: Device, work: Callable[[int], int], seconds: float, least: int = 1) -> int:
    """How many steps or pools take about so long, a multiple of `least`; the same number on every rank."""
    units = least
    while True:
        device.synchronize()
        t0 = time.perf_counter()
        work(units)
        device.synchronize()
        passed_s = world.all_reduce_max(time.perf_counter() - t0)
        if passed_s > seconds / 4:
            return least * max(1, round(units / least * seconds / passed_s))
        units *= 4


def measure(
    world: World,
    device: Device,
    parts: Parts,
    batch: Rows,
    feeds: Feeds,
    seconds: float = 1.0,
    rounds: int = ROUNDS,
    tell: Callable[[str], None] | None = None,
) -> Measured:
    """All ceilings. batch: see `first_batch`. seconds: of each measurement, about; tell: called with what is going on.

    The model is trained meanwhile: give it a learning rate of 0, and do not keep it.
    """
    tell = tell or (lambda _: None)
    transformed = parts.transform(batch)

    def compute(steps: int) -> int:
        for _ in range(steps):
            parts.step(parts.transform(batch))
        return steps

    def bare(steps: int) -> int:
        for _ in range(steps):
            parts.step(transformed)
        return steps

    def alone(steps: int) -> int:
        for _ in range(steps):
            parts.alone(parts.transform(batch))
        return steps

    real = Pools(feeds.real, parts)
    works: dict[str, tuple[Callable[[int], int], Callable[[int], int], int]] = {  # name: work, before it, units
        "compute": (compute, compute, 3),
        "bare": (bare, bare, 3),
        "alone": (alone, alone, 3),
        "loop": (real.train, real.settle, feeds.ahead),
    }
    if feeds.ahead:
        works["supply"] = real.pass_by, real.pass_by, feeds.ahead
    if feeds.staged:
        staged = Pools(feeds.staged, parts)
        works["copy"] = staged.train, staged.settle, feeds.ahead
    if feeds.cached:
        cached = Pools(feeds.cached, parts)
        works["cached"] = cached.pass_by, cached.pass_by, feeds.ahead + feeds.cached_pools
    if world.world_size == 1:
        del works["alone"]
    units, found, cpu_shares = dict[str, int](), {name: list[list[float]]() for name in works}, list[float]()
    for number in range(rounds):
        for name, (work, before, lead) in works.items():
            tell(f"round {number + 1} of {rounds}: {name}")
            if number == 0:
                before(max(lead, 1))
                units[name] = units_for(world, device, work, seconds, 3 if name in STEPS else 2 * feeds.burst)
            before(lead)
            before_s, t0 = _cpu_s(), time.perf_counter()
            found[name].append(time_of(world, device, work, units[name]))
            if name == "loop":
                cpu_shares.append(
                    (_cpu_s() - before_s) / (time.perf_counter() - t0) * world.local_world_size / available_cpus()
                )
            if name not in STEPS:  # what it reads ahead now must not take the CPUs from what comes next
                time.sleep(min(REFILL_S, feeds.ahead * (time.perf_counter() - t0) / units[name]))

    times = {name: Timing(tuple(map(max, of_rounds))) for name, of_rounds in found.items()}  # the slowest rank's

    def by_rank(name: str) -> tuple[float, ...]:
        rounds_of = zip(*found.get(name, []), strict=True)
        return tuple(Timing(each).step_s for each in rounds_of)

    def watched() -> None:
        alone(WATCHED_STEPS)

    tell("the device")
    busy_s = device.busy_s(watched)
    syncs = device.syncs(watched)
    return Measured(
        batch_size=parts.batch_size * world.world_size,
        compute=times["compute"],
        loop=times["loop"],
        copy=times.get("copy"),
        supply=times.get("supply"),
        cached=times.get("cached"),
        transform_s=max(0.0, times["compute"].step_s - times["bare"].step_s),
        ranks_compute_s=by_rank("alone") or (times["compute"].step_s,),
        ranks_supply_s=by_rank("supply"),
        busy_s=world.all_reduce_max((busy_s or 0.0) / WATCHED_STEPS) or None,
        syncs=tuple(syncs),
        cpu_share=world.all_reduce_max(Timing(tuple(cpu_shares)).step_s),
    )


class Pools:
    """A feed's pools, epoch after epoch, trained on or passed by."""

    def __init__(self, feed: Feed, parts: Parts):
        self._parts, self._pools, self._number = parts, _endless(feed), 0

    def train(self, pools: int) -> int:
        """Steps that were done on so many pools."""
        return sum(1 for _ in self.steps(pools))

    def steps(self, pools: int | None = None) -> Iterator[object]:
        """The same, one after the other; without a number, for ever."""
        for pool, times in self._take(pools):
            rng = torch.Generator(next(iter(pool.rows.columns.values())).device)
            for batch in echo(pool.rows, self._parts.batch_size, times, rng):
                yield self._parts.step(self._parts.transform(batch))

    def pass_by(self, pools: int) -> int:
        """Steps that would have been done."""
        return sum(times * ceil(len(pool.rows) / self._parts.batch_size) for pool, times in self._take(pools))

    def settle(self, pools: int) -> int:
        """Pass by so many that lie ready, then train on as many: so a slow supply shows at once, not when what was
        prepared is used up."""
        return self.pass_by(pools) + self.train(pools)

    def _take(self, pools: int | None) -> Iterator[tuple[Pool, int]]:
        for _ in count() if pools is None else range(pools):
            self._number += 1
            yield next(self._pools), echo_passes(self._parts.echo, self._number)


def _endless(feed: Feed) -> Iterator[Pool]:
    for epoch in count():
        yield from feed.pools(epoch)


def _cpu_s() -> float:
    """CPU time of this process and of its workers, those that have ended among them."""
    me = psutil.Process()
    total = sum(me.cpu_times()[:4])
    for child in me.children(recursive=True):
        try:
            total += sum(child.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return total


def _short(path: str) -> str:
    found = Path(path)
    return str(found.relative_to(Path.cwd())) if found.is_relative_to(Path.cwd()) else "/".join(found.parts[-2:])
