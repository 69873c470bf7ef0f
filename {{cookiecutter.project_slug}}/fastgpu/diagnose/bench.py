"""The training of a config, built by the functions of train.py, so that its parts can be measured."""

from functools import partial
from itertools import count, islice
from math import ceil
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fastgpu.diagnose import ceilings
from fastgpu.diagnose.ceilings import FeedPlan, Loop, Meter, Supply, read_pool, repeat
from fastgpu.diagnose.verdict import Measured
from fastgpu.feed.tiers import Placement
from fastgpu.process.config import Config
from fastgpu.process.world import World
from fastgpu.rows.order import BlockSampler, Shard
from fastgpu.rows.rows import Rows
from fastgpu.training.step import reseed

POOL_S = 0.1
"""Larger pools are cut until one takes this long to train on or to supply; measuring whole ones would take minutes."""


class Bench:
    """The training of one config. Every rank has a bench, and calls the same methods in the same order."""

    def __init__(self, train: ModuleType, config: Config, world: World, seconds: float):
        """train: the module train.py. seconds: longest time of a measurement.

        Raises UserError if the training cannot be built.
        """
        self.config = config
        self.world = world
        self.meter = Meter(world, seconds)
        parts = train.build(config, world)
        parts.loader.close()
        parts.val_loader.close()
        self.parts = parts._replace(loader=None, val_loader=None)  # measurements open feeds of their own
        self.sizes = parts.sizes
        world.check_same({"data.tier": self.sizes.tier}, "set data.tier: free memory differs")
        self._seed = config.run.seed
        self._pool_batches = 1
        batch = self._read_pool()
        self.loop = _make_loop(train, self.parts, batch.to(world.device), world)
        self.loop.step()  # DDP needs a step before the bare model runs, so this is the first
        slowest_s = max(self.meter.run(partial(repeat, self.loop.step), 3)[1])
        if self.sizes.tier == "disk":
            slowest_s = max(slowest_s, self._supply_s(self.sizes.n_readers))
        self._pool_batches = min(self.sizes.pool_batches, max(1, round(POOL_S / slowest_s)))

    def measure(self) -> Measured:
        """Every part of the training loop."""
        sizes, device = self.sizes, self.world.device
        copy = None
        if device.type == "cuda" and sizes.tier != "device":
            pool = self._read_pool()
            n_steps = self.loop.echo * ceil(len(pool) / sizes.batch_size)
            copy = ceilings.copies(pool, self.parts.train_rows.fields, device, n_steps)
        supplies = ceilings.open_supplies(self._plan(sizes.n_readers), self.loop)
        measured = ceilings.measure(self.meter, self.loop, supplies, copy)
        for supply in supplies.values():
            supply.feed.close()
        return measured

    def try_readers(self) -> tuple[str, float]:
        """Twice as many readers, as a setting, and the seconds per step of the supply with them."""
        n_readers = max(1, 2 * self.sizes.n_readers)
        setting = f"loader.{'num_workers' if self.sizes.uses_workers else 'num_readers'}={n_readers}"
        self.world.print_once(f"trying {setting}")
        return setting, self._supply_s(n_readers)

    @property
    def title(self) -> str:
        """What was measured, in a few words."""
        batch_size = self.config.data.batch_size
        return f"{self.world}, {batch_size} rows per step, {self.sizes.tier} tier, {self.sizes.n_readers} readers"

    def trace(self, n_steps: int, path: Path) -> None:
        """Write a profile of some steps of the loop, on rank 0."""
        supply = Supply(self._plan(self.sizes.n_readers), self.loop)
        steps = (step for _ in count() for step in supply.steps())
        next(steps)
        with torch.profiler.profile() as profile:
            list(islice(steps, n_steps))
            self.meter.synchronize()
        supply.feed.close()
        if self.world.is_main:
            path.parent.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(path))

    def _supply_s(self, n_readers: int) -> float:
        """Seconds per step of the supply with that many readers, after the pools that lie ready."""
        supply = Supply(self._plan(n_readers), self.loop)
        supply.drain(supply.n_ready)
        _, _, ranks_s = self.meter.run_long(supply.drain, 2 * supply.n_joint)
        supply.feed.close()
        return max(ranks_s)

    def _read_pool(self) -> Rows:
        return read_pool(self.parts.train_rows, self._next_order(), self.sizes.n_readers)

    def _plan(self, n_readers: int) -> FeedPlan:
        """The feed of the training, with pools as small as `POOL_S` says."""
        placement = Placement(self.sizes.tier, self.world.device, n_readers)
        return FeedPlan(self.parts.train_rows, self._next_order(), placement, self.config.loader)

    def _next_order(self) -> BlockSampler:
        """Another order each time: what is measured second must not find its blocks in the page cache."""
        self._seed += 1
        sizes = self.sizes
        shard = Shard(self.world.rank, self.world.world_size, sizes.canonical_ranks)
        return BlockSampler(self.parts.train_rows, sizes.batch_size, shard, self._pool_batches, seed=self._seed)


def _make_loop(train: ModuleType, parts: Any, batch: Rows, world: World) -> Loop:
    local_parts = parts
    if world.world_size > 1:
        local_parts = parts._replace(ddp=parts.model)
        if parts.config.train.compile:  # so far only DDP around the model is compiled
            parts.model.compile()
    rng = reseed(world, parts.config.run.seed)
    return Loop(
        transform=lambda rows: parts.workload.transform(rows, rng),
        train_step=lambda rows: train.train_step(parts, rows, 0.0),  # a learning rate of 0 keeps the weights
        local_step=lambda rows: train.train_step(local_parts, rows, 0.0),
        batch=batch,
        batch_size=parts.sizes.batch_size,
        echo=parts.config.data.echo,
    )
