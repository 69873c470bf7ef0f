"""Measures how fast each part of the training loop is without the others.

The parts are the fields of `Measured` in verdict.py, which draws the conclusions. Each round measures every part once,
and the last round is the one after which `is_enough` is true. All ranks measure the same part at the same time, with
the same number of steps and pools, because a rank that averages gradients must not wait for a rank that has stopped.
"""

import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from itertools import count, islice
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch

from fastgpu.dataset.source import ItemDataset
from fastgpu.diagnose.verdict import MAX_ROUNDS, N_ROUNDS, Measured, Rounds, is_enough
from fastgpu.feed.loader import Loader
from fastgpu.feed.prefetch import PrefetchLoader
from fastgpu.feed.readers import choose_readers
from fastgpu.feed.tiers import ResidentRows, one_ahead, open_loader
from fastgpu.process.config import Config, LoaderConfig
from fastgpu.process.machine import available_cpus
from fastgpu.process.world import World
from fastgpu.rows.contract import Dataset
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.rows import Ragged, Rows
from fastgpu.storage.store import HDF5Dataset

MAX_REST_S = 2.0  # maximum rest after a measurement, in which a feed reads ahead as far as it may
MAX_S = 40.0  # after this time no round begins, unless there are fewer than N_ROUNDS
PARTS = 8  # for each worker of a Dataset, so that all of them are done with a pool at almost the same time
MAX_EPOCHS = 10**9  # so that each epoch is read ahead
OBSERVED_STEPS = 10  # steps under the profiler, and steps in which places that wait for the device are looked for

Work = Callable[[int], float]
"""work(n_units) does that many steps, or takes that many pools, and returns the number of steps that this makes."""


# ---------------------------------------------------------------------------------------------- the loop and its feed


class Loop(NamedTuple):
    """The steps of the training loop, and the source and config of its feed."""

    transform: Callable[[Rows], Rows]
    train_step: Callable[[Rows], object]
    local_step: Callable[[Rows], object]
    """The same step, but gradients are not averaged over the ranks."""
    batch: Rows
    """One batch, which stays on the device."""
    source: Dataset
    config: Config
    """Without `auto`."""
    device: torch.device
    other: Loader | None = None
    """A loader of the user's own. None: the feed of this project is measured, opened again for each measurement."""

    @property
    def tier(self) -> str:
        return self.config.data.tier

    @property
    def readers(self) -> tuple[str, int]:
        """(key of section `loader`, number): reader threads, or worker processes of a Dataset."""
        return choose_readers(self.source, self.config.loader, 1)

    def step(self) -> None:
        self.train_step(self.transform(self.batch))


class Supply:
    """The pools of a feed, epoch after epoch: trained on, or only taken."""

    n_ready = 0
    """Number of pools that the feed has ready after a rest."""
    n_first: int
    """Number of pools until each block of an epoch has been read once."""
    n_joint = 1
    """Pools that may arrive at the same time, because as many worker processes started at the same time."""

    def __init__(self, loop: Loop, sampler: BlockSampler):
        source, (_, n_readers) = loop.source, loop.readers
        self._loop = loop
        sampler_of_run = sampler
        if loop.tier != "device":
            self.n_ready = loop.config.loader.prefetch_pools + 1
        if loop.tier == "disk" and isinstance(source, ItemDataset):
            # A pool of a run, which may be larger, has work for all workers: a small one is cut into smaller parts.
            epoch_batches = sampler.pools_per_epoch * sampler.pool_batches
            n_parts = min(PARTS * max(1, n_readers), int(loop.config.data.pool_batches), epoch_batches)
            sampler = copy(sampler)
            sampler.batch_size = min(sampler.batch_size, max(1, sampler.max_pool_rows // n_parts))
            self.n_joint = max(1, min(self.n_ready, ceil(n_readers / n_parts)))
        settings = loop.config.resolved(train={"epochs": MAX_EPOCHS})
        self.feed = open_loader(source, sampler, ResidentRows([source], settings, loop.device), settings)
        self.feed.sampler = sampler_of_run
        self.feed.prepare()  # reads rows that stay in memory before the feed is measured
        self.n_first = self.n_ready + sampler_of_run.pools_per_epoch
        self._pools = (pool for epoch in count() for pool in self.feed.pools(epoch))

    def steps(self) -> Iterator[object]:
        """The steps on one pool."""
        for batch in self.feed.echo(next(self._pools)):
            yield self._loop.train_step(self._loop.transform(batch))

    def train(self, n_pools: int) -> int:
        """Train on that many pools. Returns the number of steps."""
        return sum(1 for _ in range(n_pools) for _ in self.steps())

    def drain(self, n_pools: int) -> int:
        """Take that many pools without training on them. Returns the number of steps that they are enough for."""
        plans = [next(self._pools).plan for _ in range(n_pools)]
        return sum(self.feed.steps_on_pool(plan.epoch, plan.number) for plan in plans)

    def close(self) -> None:
        """End the feed."""
        self.feed.close()


class OtherSupply:
    """The batches of a loader of the user's own, epoch after epoch. A unit is a batch."""

    n_ready = 16
    """Maximum number of batches that the loader has ready after a rest."""
    n_joint = 1

    def __init__(self, loop: Loop, loader: Loader):
        self._loop = loop
        self._batches = (batch for epoch in count() for batch in loader.batches(epoch))

    def steps(self) -> Iterator[object]:
        """The step on one batch."""
        yield self._loop.train_step(self._loop.transform(next(self._batches)))

    def train(self, n_batches: int) -> int:
        """Train on that many batches. Returns the number of steps."""
        return sum(1 for _ in range(n_batches) for _ in self.steps())

    def drain(self, n_batches: int) -> int:
        """Take that many batches without training on them. Returns their number."""
        return sum(1 for _ in islice(self._batches, n_batches))

    def close(self) -> None:
        """The loader is still needed."""


Supplies = Mapping[str, Supply | OtherSupply]


def open_supplies(loop: Loop, sampler: BlockSampler) -> Supplies:
    """real: the feed of a run; cached: a feed that reads the same few blocks of files again and again."""
    if loop.other:
        return {"real": OtherSupply(loop, loop.other)}
    supplies: dict[str, Supply | OtherSupply] = {"real": Supply(loop, sampler)}
    stored = loop.source.whole or loop.source
    reads_apart = isinstance(stored, HDF5Dataset) and not stored.file.is_direct  # from decoding
    if loop.tier == "disk" and reads_apart:
        supplies["cached"] = Supply(loop, first_blocks(loop.source, sampler))
    return supplies


def first_blocks(source: Dataset, sampler: BlockSampler) -> BlockSampler:
    """A sampler of the same kind over the first blocks.

    These are two pools for all ranks, and at least one block for each canonical rank.
    """
    n_rows = 2 * sampler.pool_batches * sampler.global_batch_size
    n_blocks = int(np.searchsorted(np.cumsum(source.block_rows), n_rows)) + 1
    block_rows = source.block_rows[: max(sampler.canonical_ranks, n_blocks)]
    return BlockSampler(block_rows, sampler.batch_size, sampler.shard, sampler.pool_batches, seed=sampler.seed)


def read_pool(source: Dataset, sampler: BlockSampler, loader: LoaderConfig) -> Rows:
    """The first pool of epoch 0 on the host, in memory of its own, without gaps between ragged values."""
    feed = PrefetchLoader(source, sampler, torch.device("cpu"), one_ahead(loader))
    rows = next(feed.pools(0)).rows
    pool = rows.take(torch.arange(len(rows)))
    feed.close()
    return pool


def copies(loop: Loop, pool: Rows) -> Work:
    """Copies from staging memory to the GPU of as many bytes as a pool has. The values do not matter."""
    lengths = {name: np.diff(each.host_offsets) for name, each in pool.columns.items() if isinstance(each, Ragged)}
    host = Rows.empty(loop.source.fields, len(pool), torch.device("cpu"), pinned=True, lengths=lengths)
    on_device = host.to(loop.device)
    n_steps = loop.config.data.echo * ceil(len(pool) / len(loop.batch))
    return lambda n_pools: n_steps * repeat(partial(on_device.copy_, host, non_blocking=True), n_pools)


# ---------------------------------------------------------------------------------------------- the measurements


class Meter:
    """Measures times on all ranks together, and how a GPU is used. On a CPU, only times are measured."""

    def __init__(self, world: World, seconds: float):
        """seconds: longest time of a measurement, unless its smallest work takes longer."""
        self.world = world
        self._seconds = seconds
        self._is_gpu = world.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait until everything that is queued has been done."""
        if self._is_gpu:
            torch.cuda.synchronize(self.world.device)

    def run(self, work: Work, n_units: int = 1) -> tuple[int, float, list[float]]:
        """Do `n_units` of work, or 2, 4, 8, ... times as many, until they take more than half of `seconds`.

        All ranks start together. Returns the number of units, the seconds that they take, and the seconds per step on
        each rank.
        """
        while True:
            self.synchronize()
            self.world.all_reduce_max(0.0)
            t0 = time.perf_counter()
            n_steps = work(n_units)
            self.synchronize()
            rank_s = time.perf_counter() - t0
            passed_s = self.world.all_reduce_max(rank_s)
            if passed_s > self._seconds / 2:
                return n_units, passed_s, self.world.all_gather(rank_s / n_steps)
            n_units *= 2

    def busy_s(self, work: Callable[[], object]) -> float:
        """Seconds in which the device was busy during `work`. 0: the profiler sees no kernels, as in a container."""
        if not self._is_gpu:
            return 0.0
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            work()
            self.synchronize()
        on_device = (each for each in profile.events() if each.device_type == torch.autograd.DeviceType.CUDA)
        kernels = (each for each in on_device if not each.is_user_annotation and not each.name.startswith("Mem"))
        return sum(kernel.time_range.elapsed_us() for kernel in kernels) / 1e6

    def syncs(self, work: Callable[[], object]) -> list[str]:
        """The lines of code at which `work` made the host wait for the device, as `file.py:12`."""
        if not self._is_gpu:
            return []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                torch.cuda.set_sync_debug_mode("warn")
                work()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        syncs = [each for each in caught if "called a synchronizing" in str(each.message)]
        return list(dict.fromkeys(f"{os.path.relpath(sync.filename)}:{sync.lineno}" for sync in syncs))


class _Task(NamedTuple):
    work: Work
    warm_up: Callable[[], object]
    multiple: int = 1
    """The number of timed units is a multiple of this."""
    n_ready: int = 0
    """Units that the feed reads ahead afterwards. The next task begins after that, so that it has the CPUs."""


class _Round(NamedTuple):
    """The measurements of one round. `Measured` explains `cpu_share` and `waiting`."""

    step_s: dict[str, list[float]]
    """{task: seconds per step on each rank}"""
    cpu_share: float
    waiting: float | None


def measure(
    meter: Meter,
    loop: Loop,
    sampler: BlockSampler,
    copy: Work | None = None,
    *,
    stop: Callable[[Measured], bool] = is_enough,
) -> Measured:
    """Measure every part, round after round, until `stop` returns True. copy: copies that many pools.

    The steps change the model (running statistics, and the weights unless the learning rate is 0): do not keep it.
    """
    world = meter.world
    observed = partial(repeat, lambda: loop.local_step(loop.transform(loop.batch)), OBSERVED_STEPS)
    busy_s = world.all_reduce_max(meter.busy_s(observed)) / OBSERVED_STEPS
    syncs = tuple(meter.syncs(observed))
    supplies = open_supplies(loop, sampler)
    tasks = _tasks(loop, supplies, copy, world)
    n_units = {name: task.multiple for name, task in tasks.items()}
    has_workers = isinstance(loop.source, ItemDataset) and loop.tier == "disk" and not loop.other
    n_workers = loop.readers[1] if has_workers else 0
    rounds: list[_Round] = []
    deadline = time.perf_counter() + MAX_S
    stored = loop.source.whole or loop.source
    n_requests = loop.source.n_requests
    for number in range(MAX_ROUNDS):
        world.print_once(f"measuring: round {number + 1} of at most {MAX_ROUNDS}")
        rounds.append(_measure_round(meter, tasks, n_units, n_workers))
        measured = Measured(
            batch_size=sampler.global_batch_size,
            **_join(rounds),
            busy_s=busy_s or None,
            syncs=syncs,
            is_other=loop.other is not None,
            is_uncached=isinstance(stored, HDF5Dataset) and stored.file.is_direct,
            is_fetched=loop.source.n_requests > n_requests,
        )
        is_late = time.perf_counter() > deadline and number + 1 >= N_ROUNDS
        if world.broadcast(is_late or stop(measured)):
            break
    for supply in supplies.values():
        supply.close()
    return measured


def _measure_round(meter: Meter, tasks: Mapping[str, _Task], n_units: dict[str, int], n_workers: int) -> _Round:
    """Measure each task once.

    n_units: {task: number of units to begin with}, which becomes the number that was measured. n_workers: number of
    worker processes of a torch Dataset.
    """
    world = meter.world
    step_s = {}
    cpu_share, waiting = 0.0, None
    for name, task in tasks.items():
        task.warm_up()
        t0, cpu_t0 = time.perf_counter(), _cpu_s()
        n_units[name], passed_s, step_s[name] = meter.run(task.work, n_units[name])
        n_cpus = (_cpu_s() - cpu_t0) / (time.perf_counter() - t0)
        if name == "loop":
            cpu_share = world.all_reduce_max(n_cpus * world.local_world_size / available_cpus())
        if name == "supply" and n_workers:
            # More workers than CPUs wait for each other, not for a disk.
            n_busy = min(n_workers, available_cpus() / world.local_world_size)
            waiting = 1 - world.all_reduce_max(n_cpus / n_busy)
        time.sleep(min(MAX_REST_S, task.n_ready * passed_s / n_units[name]))
    return _Round(step_s, cpu_share, waiting)


def _join(rounds: Sequence[_Round]) -> dict[str, Any]:
    """The fields of `Measured` that are measured in each round."""
    fields: dict[str, Any] = {"cpu_share": Rounds(each.cpu_share for each in rounds)}
    for name in rounds[0].step_s:
        by_rank = tuple(map(Rounds, zip(*(each.step_s[name] for each in rounds), strict=True)))
        if name in ("local", "supply"):
            fields["ranks_compute" if name == "local" else "ranks_supply"] = by_rank
        if name != "local":
            fields[name] = Rounds(max(each.step_s[name]) for each in rounds)
    waiting = [each.waiting for each in rounds if each.waiting is not None]
    return fields | {"waiting": Rounds(waiting) if waiting else None}


def _tasks(loop: Loop, supplies: Supplies, copy: Work | None, world: World) -> dict[str, _Task]:
    """{field of `Measured`: its task}, in the order of a round. local: see `Measured.ranks_compute`."""
    transformed = loop.transform(loop.batch)
    steps: dict[str, Callable[[], object]] = {
        "compute": loop.step,
        "untransformed": lambda: loop.train_step(transformed),
    }
    if world.world_size > 1:
        steps["local"] = lambda: loop.local_step(loop.transform(loop.batch))
    tasks = {name: _Task(partial(repeat, step), step) for name, step in steps.items()}
    if copy:
        tasks["copy"] = _Task(copy, partial(copy, 1))
    real = supplies["real"]
    multiple = 2 * real.n_joint
    if real.n_ready:  # the loop follows without a rest, so it finds no pools ready
        tasks["supply"] = _Task(real.drain, partial(real.drain, real.n_ready), multiple)
    tasks["loop"] = _Task(real.train, partial(real.train, real.n_ready), multiple, real.n_ready)
    if isinstance(cached := supplies.get("cached"), Supply):
        tasks["cached"] = _Task(cached.drain, partial(cached.drain, cached.n_first), 2, cached.n_ready)
    return tasks


def repeat(step: Callable[[], object], n_steps: int) -> int:
    """The same step again and again. Returns the number of steps."""
    for _ in range(n_steps):
        step()
    return n_steps


def _cpu_s() -> float:
    """CPU time of this process and of its workers, including workers that have ended."""
    process = psutil.Process()
    total_s = 0.0
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            total_s += sum(each.cpu_times()[:4])
    return total_s
