"""The training of a config, built by the functions of train.py, so that its parts can be measured."""

import sys
from collections.abc import Callable
from itertools import count, islice
from math import inf
from pathlib import Path
from typing import Any

import torch

import train
from fastgpu.diagnose import ceilings
from fastgpu.diagnose.ceilings import Device, Feeds, Loop, Meter, Pools, open_feeds, read_pool, steps_of
from fastgpu.diagnose.verdict import Facts, Measured, Rounds, Setting
from fastgpu.feed.sizes import choose_readers, choose_tier, choose_workers, may_stay
from fastgpu.feed.tiers import Placement
from fastgpu.process.config import Config, Tier, nested
from fastgpu.process.launch import RankError, UserError
from fastgpu.process.world import World
from fastgpu.rows.contract import Dataset
from fastgpu.rows.order import BlockSampler, Shard
from fastgpu.rows.rows import Rows
from fastgpu.storage.store import HDF5Dataset
from fastgpu.training.parallel import reseed

POOL_S = 0.1
"""Larger pools are cut until one takes this long to train on or to supply; measuring whole ones would take minutes."""
TIERS: tuple[Tier, ...] = ("disk", "host", "device")  # from the farthest to the nearest
FASTER = (Setting("train.compile", True), Setting("train.precision", "bf16"))
"""Settings that may make a step faster on a GPU."""


class Bench:
    """The training of one config. Every rank has a bench, and calls the same methods in the same order."""

    def __init__(self, config: Config, world: World, seconds: float):
        """seconds: about as long as each measurement takes. Raises UserError if the training cannot be built."""
        self.config = config
        self.world = world
        self.meter = Meter(world, Device(world.device), seconds)
        parts = train.build(config, world)
        parts.loader.close()
        parts.val_loader.close()
        self.parts = parts._replace(loader=None, val_loader=None)  # type: ignore[arg-type]  # measurements open feeds of their own
        self.sizes = parts.sizes
        world.check_same({"data.tier": self.sizes.tier}, "set data.tier: free memory differs")
        self._seed = config.run.seed
        self._pool_batches = 1
        with world.together():
            batch = read_pool(parts.train_rows, self._next_order(parts.train_rows, 1), self.sizes.n_readers)
        self.loop = _make_loop(self.parts, batch.to(world.device), world)
        can_step = True
        try:  # DDP needs a step before the bare model runs, so this is the first
            self.loop.train_step(self.loop.transform(self.loop.batch))
        except torch.cuda.OutOfMemoryError:
            can_step = False
        batch_size = config.data.batch_size
        with world.together():
            if not can_step:
                raise UserError(f"data.batch_size is {batch_size}: out of memory; use a smaller one")
        self.compute = self._time_step(self.loop.transform)
        slowest_s = self.compute.median
        if self.sizes.tier == "disk":
            slowest_s = max(slowest_s, self._rough_supply_s())
        self._pool_batches = min(self.sizes.pool_batches, max(1, round(POOL_S / slowest_s)))

    def measure(self) -> Measured:
        """Every part of the training loop."""
        feeds = self._open_feeds()
        measured = ceilings.measure(self.meter, self.loop, feeds, report=self.show)
        feeds.close()
        self.compute = measured.compute
        return measured

    def try_setting(self, readers: Setting) -> float:
        """Seconds per step of the supply with another number of readers (see `verdict.judge`).

        inf if that is not possible, as for want of memory.
        """
        self.show(f"trying {readers}")
        try:
            feeds = self._open_feeds(readers, only_real=True)
        except RankError:
            raise
        except UserError:  # raised on every rank
            return inf
        pools = Pools(feeds.real, self.loop)
        pools.drain(feeds.n_ready_pools)
        n_pools = self.meter.choose_units(pools.drain, 2 * feeds.n_joint_pools)
        _, ranks_s = self.meter.run(pools.drain, n_pools)
        feeds.close()
        return max(ranks_s)

    def _rough_supply_s(self) -> float:
        """Seconds per step of the supply, as far as the first pools show them."""
        feeds = self._open_feeds(only_real=True)
        _, ranks_s = self.meter.run(Pools(feeds.real, self.loop).drain, 2 * feeds.n_joint_pools)
        feeds.close()
        return max(ranks_s)

    @property
    def subject(self) -> dict[str, Any]:
        """What was measured. config: {dotted key: value}, without `auto`."""
        return {
            "world": str(self.world),
            "machine": {
                "device": self.world.device_name,
                "world_size": self.world.world_size,
                "local_world_size": self.world.local_world_size,
                "row_bytes": self.parts.train_rows.row_bytes,
            },
            "config": self.parts.config.flat() | {"data.echo": self.loop.echo},
        }

    @property
    def title(self) -> str:
        """What was measured, in a few words."""
        batch_size = self.config.data.batch_size
        return f"{self.world}, {batch_size} rows per step, {self.sizes.tier} tier, {self.sizes.n_readers} readers"

    def facts(self) -> Facts:
        """What can be changed about this training."""
        parts = self.parts
        source = parts.train_rows
        config = parts.config
        uses_workers = self.sizes.uses_workers
        can_stay = may_stay(source) and may_stay(parts.val_rows)
        nearest_tier = choose_tier("auto", self.sizes.need, self.sizes.free, source.name, can_stay=can_stay)
        faster = [setting for setting in FASTER if config.flat()[setting.key] in (False, "fp32")]
        repack = f"python convert.py dataset {config.data.dataset} {config.data.train} train.h5"
        return Facts(
            readers_key="loader.num_workers" if uses_workers else "loader.num_readers",
            n_readers=self.sizes.n_readers,
            nearer_tier=nearest_tier if TIERS.index(nearest_tier) > TIERS.index(self.sizes.tier) else None,
            max_batch_size=len(source),
            echo=self.loop.echo,
            float_fields={name: each.dtype.itemsize for name, each in source.fields.items() if each.dtype.kind == "f"},
            filters=source.filters if isinstance(source, HDF5Dataset) else "",
            is_fp16=parts.precision.name == "fp16",
            repack_command=repack if uses_workers else "",
            faster=tuple(faster) if self.world.device.type == "cuda" else (),
        )

    def trace(self, n_steps: int, path: Path) -> None:
        """Write a profile of some steps of the loop, on rank 0. Raises UserError if it cannot be written."""
        feeds = self._open_feeds(only_real=True)
        pools = Pools(feeds.real, self.loop)
        steps = (step for _ in count() for step in pools.steps())
        next(steps)
        with torch.profiler.profile() as profile:
            list(islice(steps, n_steps))
            self.meter.device.synchronize()
        feeds.close()
        with self.world.together():
            if self.world.is_main:
                try:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    profile.export_chrome_trace(str(path))
                except OSError as error:
                    raise UserError(f"cannot write {path} ({error.strerror})") from None

    def show(self, text: str) -> None:
        """Print the progress to stderr."""
        if self.world.is_main:
            print(text, file=sys.stderr, flush=True)

    def _open_feeds(self, readers: Setting | None = None, *, only_real: bool = False) -> Feeds:
        """The feeds of the training, with pools as small as `POOL_S` says.

        readers: another number of them. Raises UserError on every rank if that is not possible on one.
        """
        config = self.parts.config
        if readers:
            config = config.resolved(**nested({readers.key: readers.value}))
        source = self.parts.train_rows
        n_ranks = self.world.local_world_size
        with self.world.together():
            if self.sizes.uses_workers:
                n_readers = choose_workers(config.loader.num_workers, n_ranks)
            else:
                n_readers = choose_readers(config.loader.num_readers, n_ranks)
            placement = Placement(self.sizes.tier, self.world.device, n_readers)
            order = self._next_order(source, self._pool_batches)
            return open_feeds(source, order, placement, config.loader, only_real=only_real)

    def _next_order(self, source: Dataset, pool_batches: int) -> BlockSampler:
        """Another order each time: what is measured second must not find its blocks in the page cache."""
        self._seed += 1
        shard = Shard(self.world.rank, self.world.world_size, self.sizes.canonical_ranks)
        return BlockSampler(source, self.sizes.batch_size, shard=shard, pool_batches=pool_batches, seed=self._seed)

    def _time_step(self, transform: Callable[[Rows], Rows]) -> Rounds:
        """Seconds per step on one batch, with this transform."""
        return self.meter.timing(steps_of(lambda: self.loop.train_step(transform(self.loop.batch))))


def _make_loop(parts: train.Parts, batch: Rows, world: World) -> Loop:
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
