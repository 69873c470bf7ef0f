"""Measures how fast each part of the training loop is without the others.

The parts are the fields of `Measured` in verdict.py, which draws the conclusions. They take turns in each round, until
the rounds tell enough, and all ranks measure the same thing at once. The ranks agree on the number of steps and pools,
because a rank that averages gradients must not wait for one that has stopped.
"""

import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from math import ceil
from typing import NamedTuple

import numpy as np
import psutil
import torch

from fastgpu.dataset.source import ASKS_AHEAD, ItemDataset, rows_per_ask
from fastgpu.diagnose.verdict import MAX_ROUNDS, Measured, Rounds, is_enough
from fastgpu.feed.echo import echo
from fastgpu.feed.prefetch import PrefetchLoader
from fastgpu.feed.tiers import Feed, Placement, make_feed
from fastgpu.process.config import Loader
from fastgpu.process.machine import available_cpus
from fastgpu.process.world import World
from fastgpu.rows.contract import Dataset, Out, PoolPlan, Reads
from fastgpu.rows.order import BlockSampler, echo_passes
from fastgpu.rows.rows import Rows
from fastgpu.storage.arrays import ArrayDataset

MAX_REST_S = 2.0  # maximum rest after a measurement, in which a feed reads ahead as far as it may
LOOP_WARM_UP_POOLS = 3
OBSERVED_STEPS = 10  # steps under the profiler, and steps in which places that wait for the device are looked for

Work = Callable[[int], int]
"""work(n_units) does that many steps, or takes that many pools, and returns the number of steps that this makes."""


# ---------------------------------------------------------------------------------------------- the feeds


class Feeds(NamedTuple):
    """The feed of a run, and feeds that leave a part of its work out. None: there is none on this tier or device."""

    real: Feed
    staged: Feed | None = None
    """Copies pools to the device from staging memory that is filled already. None also if the device decodes them."""
    cached: Feed | None = None
    """Reads the same few blocks again and again."""
    n_ready_pools: int = 0
    """Pools that lie ready when a feed has rested. They are taken before a measurement begins."""
    n_joint_pools: int = 1
    """Pools that may arrive at the same time, because as many worker processes started at the same time."""

    def close(self) -> None:
        """End the threads of all feeds."""
        for feed in (self.real, self.staged, self.cached):
            if feed:
                feed.close()


def open_feeds(
    source: Dataset, order: BlockSampler, placement: Placement, loader: Loader, *, only_real: bool = False
) -> Feeds:
    """The feed of a run and, if its rows are streamed, those that leave a part of the work out."""
    feeds = Feeds(make_feed(source, order, placement, loader))
    if placement.tier == "device":
        return feeds
    feeds = feeds._replace(n_ready_pools=loader.prefetch_pools + 1)
    if isinstance(source, ItemDataset):  # its workers hold rows ready, too
        n_asks_per_pool = ceil(order.max_pool_rows / rows_per_ask(source, order))
        n_held_pools = ceil(placement.n_readers * ASKS_AHEAD / n_asks_per_pool)
        n_joint_pools = max(1, ceil(placement.n_readers / n_asks_per_pool))
        feeds = feeds._replace(n_ready_pools=feeds.n_ready_pools + n_held_pools, n_joint_pools=n_joint_pools)
    if placement.tier == "disk" and not isinstance(source, ItemDataset) and not only_real:  # which reads as it decodes
        feeds = feeds._replace(cached=make_feed(source, first_blocks(source, order), placement, loader))
    copies_rows = isinstance(feeds.real, PrefetchLoader)
    if placement.device.type == "cuda" and copies_rows and not only_real:
        staged = FilledOnce(read_pool(source, order, placement.n_readers), source, n_slots=loader.prefetch_pools + 1)
        staged_order = BlockSampler(staged.block_rows, order.batch_size, pool_batches=order.pool_batches, seed=None)
        feeds = feeds._replace(staged=make_feed(staged, staged_order, Placement("disk", placement.device, 1), loader))
    return feeds


def first_blocks(source: Dataset, order: BlockSampler) -> BlockSampler:
    """The same kind of order over the fewest blocks with two pools for all ranks, and one for each canonical rank."""
    n_rows = 2 * order.pool_batches * order.global_batch_size
    n_blocks = int(np.searchsorted(np.cumsum(source.block_rows), n_rows)) + 1
    block_rows = source.block_rows[: max(order.canonical_ranks, n_blocks)]
    pool_batches = order.pool_batches
    return BlockSampler(block_rows, order.batch_size, shard=order.shard, pool_batches=pool_batches, seed=order.seed)


def read_pool(source: Dataset, order: BlockSampler, n_readers: int) -> Rows:
    """The first pool of epoch 0 on the host, in memory of its own, without gaps between ragged values."""
    placement = Placement("disk", torch.device("cpu"), n_readers)
    feed = make_feed(source, order, placement, Loader(prefetch_pools=1))
    rows = next(feed.pools(0)).rows
    pool = rows.take(torch.arange(len(rows)))
    feed.close()
    return pool


class FilledOnce(ArrayDataset):
    """The rows of one pool. Each slot of a feed gets them once; afterwards they lie in its staging memory already."""

    def __init__(self, pool: Rows, source: Dataset, n_slots: int):
        columns = {name: column.numpy() for name, column in pool.columns.items()}
        super().__init__("staged", columns, block_rows=np.array([len(pool)], np.int32), fields=source.fields)
        self._n_rows_left = n_slots * len(pool)

    def read(self, plan: PoolPlan, reads: Reads, out: Mapping[str, Out]) -> None:
        if self._n_rows_left <= 0:
            return
        self._n_rows_left -= len(reads.places)
        super().read(plan, reads, out)


# ---------------------------------------------------------------------------------------------- the device


class Device:
    """What is asked of a GPU. A CPU has no queue to wait for."""

    def __init__(self, device: torch.device):
        self._device = device
        self._is_gpu = device.type == "cuda"

    def synchronize(self) -> None:
        """Wait until everything that is queued has been done."""
        if self._is_gpu:
            torch.cuda.synchronize(self._device)

    def busy_s(self, work: Callable[[], object]) -> float:
        """Seconds in which the device was busy while `work` ran. 0: they cannot be seen."""
        if not self._is_gpu:
            return 0.0
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            work()
            self.synchronize()
        kernels_us = 0.0
        for event in profile.events():
            is_on_device = event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
            if is_on_device and not event.name.startswith("Mem"):
                kernels_us += event.time_range.elapsed_us()
        return kernels_us / 1e6  # a container that forbids profiling shows no kernel at all

    def syncs(self, work: Callable[[], object]) -> list[str]:
        """The lines of code at which `work` made the host wait for the device, as `file.py:12`."""
        if not self._is_gpu:
            return []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                work()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        syncs = [each for each in caught if "called a synchronizing" in str(each.message)]
        return list(dict.fromkeys(f"{os.path.relpath(sync.filename)}:{sync.lineno}" for sync in syncs))


# ---------------------------------------------------------------------------------------------- the loop


class Loop(NamedTuple):
    """What the training loop does with a batch."""

    transform: Callable[[Rows], Rows]
    train_step: Callable[[Rows], object]
    local_step: Callable[[Rows], object]
    """The same step, but gradients are not averaged over the ranks."""
    batch: Rows
    """One batch, which stays on the device."""
    batch_size: int
    """Rows of a step on this rank."""
    echo: float = 1.0


def steps_of(step: Callable[[], object]) -> Work:
    """The same step again and again."""

    def work(n_steps: int) -> int:
        for _ in range(n_steps):
            step()
        return n_steps

    return work


class Pools:
    """The pools of a feed, epoch after epoch: trained on, or only taken."""

    def __init__(self, feed: Feed, loop: Loop):
        self._loop = loop
        self._pools = (pool for epoch in count() for pool in feed.pools(epoch))
        self._number = 0

    def _next(self) -> tuple[Rows, int]:
        """(rows, number of times to train on them)"""
        self._number += 1
        return next(self._pools).rows, echo_passes(self._loop.echo, self._number)

    def steps(self) -> Iterator[object]:
        """The steps on one pool."""
        rows, passes = self._next()
        for batch in echo(rows, self._loop.batch_size, passes, seed=0):
            yield self._loop.train_step(self._loop.transform(batch))

    def train(self, n_pools: int) -> int:
        """Train on that many pools. Returns the number of steps."""
        return sum(1 for _ in range(n_pools) for _ in self.steps())

    def drain(self, n_pools: int) -> int:
        """Take that many pools without training on them. Returns the number of steps that they are good for."""
        pools = [self._next() for _ in range(n_pools)]
        return sum(passes * ceil(len(rows) / self._loop.batch_size) for rows, passes in pools)

    def warm_up(self, n_pools: int) -> None:
        """Drain the pools that lie ready, then train on as many: a slow feed is slow at once, not only after those."""
        self.drain(n_pools)
        self.train(n_pools)


# ---------------------------------------------------------------------------------------------- the measurements


class Meter(NamedTuple):
    """Measures times, on all ranks at once. A measurement takes about `seconds`, or as long as its smallest work."""

    world: World
    device: Device
    seconds: float = 1.0

    def run(self, work: Work, n_units: int) -> tuple[float, list[float]]:
        """Seconds that the work takes, and seconds per step on each rank. All ranks begin together."""
        self.device.synchronize()
        self.world.all_reduce_max(0.0)
        t0 = time.perf_counter()
        n_steps = work(n_units)
        self.device.synchronize()
        seconds = time.perf_counter() - t0
        return self.world.all_reduce_max(seconds), self.world.all_gather(seconds / n_steps)

    def choose_units(self, work: Work, multiple: int) -> int:
        """The number of units that take about `seconds`: a multiple of `multiple`, the same on every rank."""
        n_units = multiple
        while True:
            passed_s, _ = self.run(work, n_units)
            if passed_s > self.seconds / 4:
                return multiple * max(1, round(n_units / multiple * self.seconds / passed_s))
            n_units *= 4

    def timing(self, work: Work, multiple: int = 1) -> Rounds:
        """Seconds per step on the slowest rank. The first units, in which kernels are chosen, do not count."""
        n_units = self.choose_units(work, multiple)
        return Rounds(tuple(max(self.run(work, n_units)[1]) for _ in range(3)))


class _Task(NamedTuple):
    work: Work
    warm_up: Callable[[int], object]
    n_warm_up_units: int = 1
    multiple: int = 1
    """The number of timed units is a multiple of this."""
    is_feed: bool = False


def measure(
    meter: Meter,
    loop: Loop,
    feeds: Feeds,
    *,
    stop: Callable[[Measured], bool] = is_enough,
    report: Callable[[str], None] = lambda _: None,
) -> Measured:
    """Measure everything, round after round, until `stop` says that it is enough. report: is called with a line about
    each round.

    The steps change the model (running statistics, and the weights unless the learning rate is 0): do not keep it.
    """
    tasks = _tasks(loop, feeds, meter.world)
    n_units = {}
    step_s: dict[str, list[list[float]]] = {name: [] for name in tasks}  # of each round: of each rank
    cpu_shares = []
    rest_s = 0.0
    left = ""
    busy_s = 0.0
    syncs: list[str] = []
    observed = steps_of(lambda: loop.local_step(loop.transform(loop.batch)))
    for number in count():
        report(f"measuring: round {number + 1} of at most {MAX_ROUNDS}{left}")
        round_t0 = time.perf_counter()
        for name, task in tasks.items():
            task.warm_up(task.n_warm_up_units)
            if number == 0:
                n_units[name] = meter.choose_units(task.work, task.multiple)
            cpu_t0 = _cpu_s()
            passed_s, ranks_s = meter.run(task.work, n_units[name])
            step_s[name].append(ranks_s)
            if name == "loop":
                n_cpus = (_cpu_s() - cpu_t0) / passed_s * meter.world.local_world_size
                cpu_shares.append(meter.world.all_reduce_max(n_cpus / available_cpus()))
            if name == "supply":
                rest_s = min(MAX_REST_S, feeds.n_ready_pools * passed_s / n_units[name])
            if task.is_feed and name != "supply":  # it reads ahead: this must not take the CPUs from the next task
                time.sleep(rest_s)
        if number == 0:
            busy_s = meter.world.all_reduce_max(meter.device.busy_s(partial(observed, OBSERVED_STEPS))) / OBSERVED_STEPS
            syncs = meter.device.syncs(partial(observed, OBSERVED_STEPS))
        by_rank = {name: tuple(map(Rounds, zip(*rounds, strict=True))) for name, rounds in step_s.items()}
        slowest = {name: Rounds(tuple(map(max, rounds))) for name, rounds in step_s.items() if name != "local"}
        measured = Measured(
            batch_size=loop.batch_size * meter.world.world_size,
            **slowest,
            ranks_compute=by_rank.get("local", ()),
            ranks_supply=by_rank.get("supply", ()),
            busy_s=busy_s or None,
            syncs=tuple(syncs),
            cpu_share=Rounds(tuple(cpu_shares)),
        )
        if meter.world.broadcast(stop(measured)):
            return measured
        left = f", at most {(MAX_ROUNDS - number - 1) * (time.perf_counter() - round_t0):.0f} s left"
    raise AssertionError("there is a last round")


def _tasks(loop: Loop, feeds: Feeds, world: World) -> dict[str, _Task]:
    transformed = loop.transform(loop.batch)
    steps = {
        "compute": steps_of(lambda: loop.train_step(loop.transform(loop.batch))),
        "untransformed": steps_of(lambda: loop.train_step(transformed)),
    }
    if world.world_size > 1:
        steps["local"] = steps_of(lambda: loop.local_step(loop.transform(loop.batch)))
    tasks = {name: _Task(work, work) for name, work in steps.items()}

    n_ready = feeds.n_ready_pools
    multiple = 2 * feeds.n_joint_pools
    real = Pools(feeds.real, loop)
    if n_ready:  # the loop follows at once: no pools lie ready for it
        tasks["supply"] = _Task(real.drain, real.drain, n_ready, multiple, is_feed=True)
    tasks["loop"] = _Task(real.train, real.train, min(n_ready, LOOP_WARM_UP_POOLS), multiple, is_feed=True)
    if feeds.staged:
        staged = Pools(feeds.staged, loop)
        tasks["copy"] = _Task(staged.train, staged.warm_up, n_ready, multiple, is_feed=True)
    if feeds.cached:
        cached = Pools(feeds.cached, loop)
        n_warm_up = n_ready + feeds.cached.order.pools_per_epoch  # until each of its blocks has been read once
        tasks["cached"] = _Task(cached.drain, cached.drain, n_warm_up, multiple, is_feed=True)
    return tasks


def _cpu_s() -> float:
    """CPU time of this process and of its workers, including workers that have ended."""
    process = psutil.Process()
    total_s = sum(process.cpu_times()[:4])
    for child in process.children(recursive=True):
        try:
            total_s += sum(child.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return total_s
