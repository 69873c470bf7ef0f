"""Measures how fast each part of the training loop is without the others. verdict.py draws the conclusions.

    compute        transform and step on one batch that stays on the device
    untransformed  the step on that batch, transformed beforehand
    local          like compute, but no rank averages gradients with the others
    copy           transform and step on pools that are copied from staging memory which is filled already
    supply         the feed, without a step behind it
    cached         the feed of a few blocks again and again, so from the page cache
    loop           the training loop itself

They take turns in each of several rounds, and all ranks measure the same thing at once. The ranks agree on the number
of steps and pools, because a rank that averages gradients must not wait for one that has stopped.
"""

import time
from collections.abc import Callable, Iterator
from itertools import count
from math import ceil
from typing import NamedTuple

import psutil
import torch

from fastgpu.diagnose.device import Device
from fastgpu.diagnose.feeds import Feeds
from fastgpu.diagnose.verdict import Measured, Timing
from fastgpu.feed.echo import echo, echo_passes
from fastgpu.feed.tiers import Feed
from fastgpu.process.machine import available_cpus
from fastgpu.process.world import World
from fastgpu.rows.contract import Pool
from fastgpu.rows.rows import Rows

MAX_REST_S = 2.0
"""Maximum rest after a measurement, in which a feed reads ahead as far as it may."""
STEPS_AT_ONCE = 3
"""Steps to warm up with. The number of timed steps is a multiple of it."""
OBSERVED_STEPS = 10
"""Steps under the profiler, and steps in which places that wait for the device are looked for."""

Work = Callable[[int], int]
"""work(n_units) does that many steps, or takes that many pools, and returns the number of steps that this makes."""


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


class Meter(NamedTuple):
    """Measures times, on all ranks at once. Each measurement takes about `seconds`."""

    world: World
    device: Device
    seconds: float = 1.0

    def step_s_by_rank(self, work: Work, n_units: int) -> list[float]:
        """Seconds per step on each rank. All ranks begin together."""
        self.device.synchronize()
        self.world.all_reduce_max(0.0)
        t0 = time.perf_counter()
        n_steps = work(n_units)
        self.device.synchronize()
        return self.world.all_gather((time.perf_counter() - t0) / n_steps)

    def choose_units(self, work: Work, multiple: int) -> int:
        """The number of units that take about `seconds`: a multiple of `multiple`, the same on every rank."""
        n_units = multiple
        while True:
            self.device.synchronize()
            t0 = time.perf_counter()
            work(n_units)
            self.device.synchronize()
            passed_s = self.world.all_reduce_max(time.perf_counter() - t0)
            if passed_s > self.seconds / 4:
                return multiple * max(1, round(n_units / multiple * self.seconds / passed_s))
            n_units *= 4

    def timing(self, work: Work, multiple: int, n_rounds: int = 3) -> Timing:
        """Seconds per step on the slowest rank. The first units, in which kernels are chosen, do not count."""
        n_units = self.choose_units(work, multiple)
        return Timing(tuple(max(self.step_s_by_rank(work, n_units)) for _ in range(n_rounds)))


class Pools:
    """The pools of a feed, epoch after epoch: trained on, or only taken."""

    def __init__(self, feed: Feed, loop: Loop):
        self._loop = loop
        self._pools = _endless(feed)
        self._number = 0

    def train(self, n_pools: int) -> int:
        """Train on that many pools. Returns the number of steps."""
        return sum(1 for _ in self.steps(n_pools))

    def steps(self, n_pools: int | None = None) -> Iterator[object]:
        """The steps on that many pools, one after the other. None: without end."""
        for pool, passes in self._take(n_pools):
            rng = torch.Generator(next(iter(pool.rows.columns.values())).device)
            for batch in echo(pool.rows, self._loop.batch_size, passes, rng):
                yield self._loop.train_step(self._loop.transform(batch))

    def drain(self, n_pools: int) -> int:
        """Take that many pools without training on them. Returns the number of steps that they are good for."""
        return sum(passes * ceil(len(pool.rows) / self._loop.batch_size) for pool, passes in self._take(n_pools))

    def warm_up(self, n_pools: int) -> int:
        """Drain the pools that lie ready, then train on as many: a slow feed is slow at once, not only after those."""
        return self.drain(n_pools) + self.train(n_pools)

    def _take(self, n_pools: int | None) -> Iterator[tuple[Pool, int]]:
        """(pool, number of times to train on it)."""
        for _ in count() if n_pools is None else range(n_pools):
            self._number += 1
            yield next(self._pools), echo_passes(self._loop.echo, self._number)


def _endless(feed: Feed) -> Iterator[Pool]:
    for epoch in count():
        yield from feed.pools(epoch)


class _Task(NamedTuple):
    """One of the things to measure."""

    work: Work
    warm_up: Work
    n_warm_up_units: int
    multiple: int
    """The number of timed units is a multiple of this."""
    uses_feed: bool


def measure(
    meter: Meter, loop: Loop, feeds: Feeds, *, n_rounds: int = 5, report: Callable[[str], None] = lambda _: None
) -> Measured:
    """Measure everything. report: is called with the name of what is measured next.

    The steps change the model (running statistics, and the weights unless the learning rate is 0): do not keep it.
    """
    tasks = _tasks(loop, feeds, meter.world)
    n_units: dict[str, int] = {}
    step_s: dict[str, list[list[float]]] = {name: [] for name in tasks}  # of each round: of each rank
    cpu_shares = []
    for number in range(n_rounds):
        for name, task in tasks.items():
            report(f"round {number + 1} of {n_rounds}: {name}")
            if number == 0:
                task.warm_up(max(1, task.n_warm_up_units))
                n_units[name] = meter.choose_units(task.work, task.multiple)
            task.warm_up(task.n_warm_up_units)
            cpu_t0 = _cpu_s()
            t0 = time.perf_counter()
            step_s[name].append(meter.step_s_by_rank(task.work, n_units[name]))
            passed_s = time.perf_counter() - t0
            if name == "loop":
                n_cpus = (_cpu_s() - cpu_t0) / passed_s * meter.world.local_world_size
                cpu_shares.append(n_cpus / available_cpus())
            if task.uses_feed:  # its reading ahead must not take the CPUs from the next measurement
                time.sleep(min(MAX_REST_S, feeds.n_ready_pools * passed_s / n_units[name]))

    timings = {name: Timing(tuple(max(ranks_s) for ranks_s in rounds)) for name, rounds in step_s.items()}
    local = "local" if "local" in tasks else "compute"
    report("the device")
    busy_s, syncs = _observe(meter, loop)
    return Measured(
        batch_size=loop.batch_size * meter.world.world_size,
        compute=timings["compute"],
        loop=timings["loop"],
        copy=timings.get("copy"),
        supply=timings.get("supply"),
        cached=timings.get("cached"),
        transform_s=max(0.0, timings["compute"].step_s - timings["untransformed"].step_s),
        ranks_compute_s=_by_rank(step_s[local]),
        ranks_supply_s=_by_rank(step_s.get("supply", [])),
        busy_s=busy_s,
        syncs=syncs,
        cpu_share=meter.world.all_reduce_max(Timing(tuple(cpu_shares)).step_s),
    )


def _tasks(loop: Loop, feeds: Feeds, world: World) -> dict[str, _Task]:
    transformed = loop.transform(loop.batch)

    def compute(n_steps: int) -> int:
        for _ in range(n_steps):
            loop.train_step(loop.transform(loop.batch))
        return n_steps

    def untransformed(n_steps: int) -> int:
        for _ in range(n_steps):
            loop.train_step(transformed)
        return n_steps

    def local(n_steps: int) -> int:
        for _ in range(n_steps):
            loop.local_step(loop.transform(loop.batch))
        return n_steps

    def of_steps(work: Work) -> _Task:
        return _Task(work, work, STEPS_AT_ONCE, STEPS_AT_ONCE, uses_feed=False)

    def of_pools(work: Work, warm_up: Work, n_warm_up_pools: int) -> _Task:
        return _Task(work, warm_up, n_warm_up_pools, 2 * feeds.n_joint_pools, uses_feed=True)

    n_ready = feeds.n_ready_pools
    tasks = {"compute": of_steps(compute), "untransformed": of_steps(untransformed)}
    if world.world_size > 1:
        tasks["local"] = of_steps(local)
    real = Pools(feeds.real, loop)
    tasks["loop"] = of_pools(real.train, real.warm_up, n_ready)
    if n_ready:
        tasks["supply"] = of_pools(real.drain, real.drain, n_ready)
    if feeds.staged:
        staged = Pools(feeds.staged, loop)
        tasks["copy"] = of_pools(staged.train, staged.warm_up, n_ready)
    if feeds.cached:
        cached = Pools(feeds.cached, loop)
        tasks["cached"] = of_pools(cached.drain, cached.drain, n_ready + feeds.n_cached_pools)
    return tasks


def _observe(meter: Meter, loop: Loop) -> tuple[float | None, tuple[str, ...]]:
    """Seconds of a step in which the device is busy, and the lines of code that make the host wait for it."""

    def work() -> None:
        for _ in range(OBSERVED_STEPS):
            loop.local_step(loop.transform(loop.batch))

    busy_s = meter.device.busy_s(work) or 0.0
    syncs = meter.device.syncs(work)
    return meter.world.all_reduce_max(busy_s / OBSERVED_STEPS) or None, tuple(syncs)


def _by_rank(rounds: list[list[float]]) -> tuple[float, ...]:
    """The median over the rounds, for each rank."""
    return tuple(Timing(of_rank).step_s for of_rank in zip(*rounds, strict=True))


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
