"""The training of a config, built by the functions of train.py, so that its parts can be measured."""

from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch

from fastgpu.diagnose import ceilings
from fastgpu.diagnose.ceilings import Loop, Meter, Supply, open_supplies, read_pool, repeat
from fastgpu.diagnose.command import Program
from fastgpu.diagnose.verdict import Measured
from fastgpu.feed import PoolLoader, open_rows
from fastgpu.process.config import MAX_THREADS, Config
from fastgpu.process.seeds import reseed
from fastgpu.process.world import World
from fastgpu.rows.order import BlockSampler, Shard
from fastgpu.rows.rows import Rows
from fastgpu.training.parallel import compile_module

POOL_S = 0.1
"""Larger pools are cut until training or supply takes this long for a pool. Whole pools would take minutes."""


class Bench:
    """The training of one config. Every rank has a bench, and calls the same methods in the same order."""

    def __init__(self, train: Program, config: Config, world: World, seconds: float):
        """train: the functions of train.py. seconds: longest time of a measurement.

        Raises UserError if the training cannot be built.
        """
        self.world = world
        self.meter = Meter(world, seconds)
        parts = train.build(config, open_rows(config), world)
        for val_loader in parts.val_loaders.values():
            val_loader.close()
        self._other = None if isinstance(parts.loader, PoolLoader) else parts.loader
        if not self._other:
            parts.loader.close()  # measurements open their own feeds
        # The rows that a closed loader keeps on the device would count twice.
        self.parts = parts._replace(loader=None, val_loaders={})
        self.config = parts.config
        world.check_same({"data.tier": self.config.data.tier}, "set data.tier: free memory differs")
        self._seed = config.run.seed
        self._pool_batches = 1
        if self._other:
            first = next(iter(self._other.batches(0)))
            batch = first.take(torch.arange(len(first)))  # a loader may use the memory of a batch again
        else:
            batch = read_pool(parts.splits.train, self._next_sampler(), self.config.loader).to(world.device)
        self.loop = _make_loop(train, self.parts, batch, world)._replace(other=self._other)
        self.loop.step()  # DDP needs a step before the bare model runs, so this is the first
        self.loop.local_step(self.loop.transform(self.loop.batch))
        slowest_s = max(self.meter.run(partial(repeat, self.loop.step))[2])
        if self.loop.tier == "disk" and not self._other:
            slowest_s = max(slowest_s, self._supply_s(self.loop))
        self._pool_batches = min(int(self.config.data.pool_batches), max(1, round(POOL_S / slowest_s)))

    def measure(self) -> Measured:
        """Every part of the training loop."""
        copy = None
        if self.world.device.type == "cuda" and self.loop.tier != "device" and not self._other:
            copy = ceilings.copies(self.loop, read_pool(self.loop.source, self._next_sampler(), self.config.loader))
        return ceilings.measure(self.meter, self.loop, self._next_sampler(), copy)

    def try_readers(self) -> tuple[str, float]:
        """The setting for twice as many readers, and the seconds per step of the supply with this setting."""
        key, n_readers = self.loop.readers
        more = min(MAX_THREADS, max(1, 2 * n_readers))
        self.world.print_once(f"trying loader.{key}={more}")
        loop = self.loop._replace(config=self.config.resolved(loader={key: more}))
        return f"loader.{key}={more}", self._supply_s(loop)

    def describe(self) -> str:
        """The batch size, tier and readers, for the title of the table."""
        rows = f"{self.parts.config.data.batch_size} rows per step"
        if self._other:
            return f"{rows}, {type(self._other).__name__} as the loader"
        key, n_readers = self.loop.readers
        return f"{rows}, {self.loop.tier} tier, loader.{key}={n_readers}"

    def trace(self, n_steps: int, path: Path) -> None:
        """Write a profile of some steps of the loop, on rank 0."""
        supply = open_supplies(self.loop, self._next_sampler())["real"]
        steps = (step for _ in count() for step in supply.steps())
        next(steps)
        with torch.profiler.profile() as profile:
            list(islice(steps, n_steps))
            self.meter.synchronize()
        supply.close()
        if self.world.is_main:
            path.parent.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(path))

    def _supply_s(self, loop: Loop) -> float:
        """Seconds per step of the supply of a loop, without the pools that are ready at the start."""
        supply = Supply(loop, self._next_sampler())
        supply.drain(supply.n_ready)
        _, _, ranks_s = self.meter.run(supply.drain, 4 * supply.n_joint)
        supply.close()
        return max(ranks_s)

    def _next_sampler(self) -> BlockSampler:
        """A sampler with another order each time: a later measurement must not find its blocks in the page cache."""
        self._seed += 1
        data, rows, n_ranks = self.config.data, self.parts.splits.train, self.world.world_size
        shard = Shard(self.world.rank, n_ranks, int(data.canonical_ranks))
        return BlockSampler(rows, data.batch_size // n_ranks, shard, self._pool_batches, seed=self._seed)


def _make_loop(train: Program, parts: Any, batch: Rows, world: World) -> Loop:
    local = parts.ddp if world.world_size == 1 else parts.model
    if world.world_size > 1 and parts.config.train.compile:  # until here, only DDP around the model is compiled
        local = compile_module(local)
    local_parts = parts._replace(ddp=local)
    rng = reseed(world.device, parts.config.run.seed, world.rank)
    return Loop(
        transform=lambda rows: parts.workload.transform(rows, rng),
        train_step=lambda rows: train.train_step(parts, rows, 0.0),  # a learning rate of 0 keeps the weights
        local_step=lambda rows: train.train_step(local_parts, rows, 0.0),
        batch=batch,
        source=parts.splits.train,
        config=parts.config,
        device=world.device,
    )
