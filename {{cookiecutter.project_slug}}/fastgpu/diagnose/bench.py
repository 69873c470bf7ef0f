"""The training of a config, built by the functions of train.py, so that its parts can be measured."""

import sys
from collections.abc import Callable
from itertools import count, islice
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

import workloads
from fastgpu.diagnose import ceilings
from fastgpu.diagnose.ceilings import Device, Feeds, Loop, Meter, Pools, open_feeds, read_pool, steps_of
from fastgpu.diagnose.result import Subject, save
from fastgpu.diagnose.verdict import Cause, Facts, Measured, Overrides, Rounds, Setting
from fastgpu.feed.echo import max_echo
from fastgpu.feed.sizes import (
    Sizes,
    choose_canonical_ranks,
    choose_rank_batch,
    choose_readers,
    choose_tier,
    choose_workers,
)
from fastgpu.feed.tiers import Placement, make_order
from fastgpu.process.config import Config, Tier
from fastgpu.process.config_loader import read_options
from fastgpu.process.launch import RankError, UserError
from fastgpu.process.world import World
from fastgpu.rows.contract import Source
from fastgpu.rows.field import MAX_VALUES
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.rows import Rows
from fastgpu.storage.sources import open_source
from fastgpu.training.parallel import reseed

if TYPE_CHECKING:  # train.py is the user's; its functions are handed in by the script
    from train import Parts

POOL_S = 0.1
"""Larger pools are cut until one takes this long to train on or to supply; measuring whole ones would take minutes."""
TIERS: tuple[Tier, ...] = ("disk", "host", "device")  # from the farthest to the nearest


class Program(NamedTuple):
    """The functions of train.py that are measured."""

    build: Callable[[Config, World], "Parts"]
    train_step: Callable[["Parts", Rows, float], object]
    """(parts, batch, learning rate)"""


def as_sections(overrides: Overrides) -> dict[str, dict[str, object]]:
    """{section: {key: value}}, as in config.yaml."""
    sections: dict[str, dict[str, object]] = {}
    for key, value in overrides.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return sections


class Bench:
    """The training of one config. Every rank has a bench, and calls the same methods in the same order."""

    def __init__(self, config: Config, world: World, program: Program, seconds: float):
        """seconds: about as long as each measurement takes. Raises UserError if the training cannot be built."""
        self.config = config
        self.world = world
        self.program = program
        self.meter = Meter(world, Device(world.device), seconds)
        self.parts = program.build(config, world)
        self.parts.feed.close()
        self.parts.val_feed.close()
        self.parts = self.parts._replace(feed=None, val_feed=None)  # type: ignore[arg-type]  # measurements open feeds of their own
        self.sizes = self.parts.sizes
        world.check_equal(self.sizes.tier, "set data.tier: free memory differs")
        self._seed = config.run.seed
        self._pool_batches = 1
        source = self.parts.source
        with world.raise_on_every_rank():
            batch = read_pool(source, self._next_order(source, self.sizes, 1), self.sizes.n_readers)
        self.loop = _make_loop(self.parts, program, batch.to(world.device), world)
        batch_size = config.data.batch_size
        can_step = True
        try:  # DDP needs a step before the bare model runs, so this is the first
            self.loop.train_step(self.loop.transform(self.loop.batch))
        except torch.cuda.OutOfMemoryError:
            can_step = False
        world.check_everywhere(can_step, f"data.batch_size is {batch_size}: out of memory; use a smaller one")
        self.compute_s = self._time_step(self.loop.transform)
        slowest_s = self.compute_s
        if self.sizes.tier == "disk" and (supply := self.time_supply({})):
            slowest_s = max(slowest_s, supply.median)
        self._pool_batches = min(self.sizes.pool_batches, max(1, round(POOL_S / slowest_s)))

    def measure(self) -> Measured:
        """Every part of the training loop. On a terminal the progress is shown."""
        feeds = self._open_feeds({})
        measured = ceilings.measure(self.meter, self.loop, feeds, report=self._show)
        feeds.close()
        self._show("")
        return measured

    def time_supply(self, overrides: Overrides) -> Rounds | None:
        """The supply of rows with other settings. None: they are not possible here, for instance for want of memory."""
        try:
            feeds = self._open_feeds(overrides, only_real=True)
        except RankError:
            raise
        except UserError:  # raised on every rank
            return None
        pools = Pools(feeds.real, self.loop)
        pools.drain(2 * feeds.n_ready_pools)
        timing = self.meter.timing(pools.drain, 2 * feeds.n_joint_pools)
        feeds.close()
        return timing

    def try_setting(self, cause: Cause, setting: Setting) -> float:
        """Seconds per step of the part that the setting changes (see `verdict.judge`); inf if it is not possible."""
        overrides = {setting.key: setting.value}
        if cause == "AUGMENT":
            config = self.parts.config.resolved(**as_sections(overrides))
            workload_class = workloads.load(config.workload)
            options = read_options(config, workload_class.Options)
            workload = workload_class(options, self.parts.source, self.parts.val_source)
            rng = reseed(self.world, config.run.seed)
            return self._time_step(lambda rows: workload.transform(rows, rng))
        if cause == "COPY":
            feeds = self._open_feeds(overrides)
            assert feeds.staged
            pools = Pools(feeds.staged, self.loop)
            pools.train(2 * feeds.n_ready_pools)
            timing = self.meter.timing(pools.train, 2)
            feeds.close()
            return timing.median
        supply = self.time_supply(overrides)
        return supply.median if supply else inf

    @property
    def subject(self) -> Subject:
        """What was measured."""
        machine = self.world.identity | {"row_bytes": self.parts.source.row_bytes}
        return Subject(str(self.world), machine, self.parts.config.flat() | {"data.echo": self.loop.echo})

    @property
    def title(self) -> str:
        """What was measured, in a few words."""
        batch_size = self.parts.config.data.batch_size
        return f"{self.world}, {batch_size} rows per step, {self.sizes.tier} tier, {self.sizes.n_readers} readers"

    def facts(self) -> Facts:
        """What can be changed about this training."""
        parts = self.parts
        source = parts.source
        config = parts.config
        train = config.train
        lighter = parts.workload.lighter
        uses_workers = self.sizes.uses_workers
        is_unused = {
            Setting("train.compile", True): not train.compile,
            Setting("train.precision", "bf16"): train.precision == "fp32",
            Setting("train.channels_last", True): not train.channels_last,
        }
        is_gpu = self.world.device.type == "cuda"
        repack = f"python convert.py repack --dataset {config.data.dataset} {config.data.train} train.h5"
        return Facts(
            readers_key="loader.num_workers" if uses_workers else "loader.num_readers",
            n_readers=self.sizes.n_readers,
            nearer_tier=self._nearer_tier(),
            max_batch_size=len(source),
            echo=self.loop.echo,
            max_echo=max_echo(parts.workload.is_random),
            float_fields={
                name: field.dtype.itemsize for name, field in source.fields.items() if field.dtype.kind == "f"
            },
            filters=source.filters,
            pin_memory=config.loader.pin_memory,
            is_fp16=parts.precision.name == "fp16",
            lighter=tuple(
                Setting(f"model.{key}", lighter[key]) for key in lighter if config.model[key] != lighter[key]
            ),
            repack_command=repack if uses_workers else "",
            faster=tuple(setting for setting in is_unused if is_gpu and is_unused[setting]),
        )

    def trace(self, n_steps: int, path: Path) -> None:
        """Write a profile of some steps of the loop, on rank 0. Raises UserError if it cannot be written."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.world.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        feeds = self._open_feeds({}, only_real=True)
        pools = Pools(feeds.real, self.loop)
        steps = (step for _ in count() for step in pools.steps())
        list(islice(steps, ceilings.STEPS_AT_ONCE))
        with torch.profiler.profile(activities=activities) as profile:
            list(islice(steps, n_steps))
            self.meter.device.synchronize()
        feeds.close()
        with self.world.raise_on_every_rank():
            if self.world.is_main:
                save(path, lambda path: profile.export_chrome_trace(str(path)))

    def _open_feeds(self, overrides: Overrides, *, only_real: bool = False) -> Feeds:
        """Feeds as with other settings. Pools are as small as `POOL_S` says, unless their size is one of the settings.

        Raises UserError on every rank if the settings are not possible on one.
        """
        config = self.config.resolved(**as_sections(overrides))
        pool_batches = overrides.get("data.pool_batches", self._pool_batches)
        with self.world.raise_on_every_rank():
            source = self.parts.source
            sizes = self.sizes
            if overrides:
                source = open_source(config.data, "train", config.loader, config.hdf5)
                sizes = self._choose_sizes(config, source)
            order = self._next_order(source, sizes, pool_batches)
            placement = Placement(sizes.tier, self.world.device, sizes.n_readers)
            return open_feeds(source, order, placement, config.loader, only_real=only_real)

    def _choose_sizes(self, config: Config, source: Source) -> Sizes:
        """The sizes of this training with another batch size or number of readers."""
        data = config.data
        world = self.world
        batch_size = choose_rank_batch(data.batch_size, world.world_size, config.optim.accumulation_steps, source)
        canonical_ranks = choose_canonical_ranks(data.canonical_ranks, data.batch_size, world.world_size, source)
        if self.sizes.uses_workers:
            n_readers = choose_workers(config.loader, batch_size * source.row_bytes, world.local_world_size)
        else:
            n_readers = choose_readers(config.loader.num_readers, world.local_world_size)
        return self.sizes._replace(batch_size=batch_size, canonical_ranks=canonical_ranks, n_readers=n_readers)

    def _next_order(self, source: Source, sizes: Sizes, pool_batches: int) -> BlockSampler:
        """Another order each time: what is measured second must not find its blocks in the page cache."""
        self._seed += 1
        return make_order(source, sizes._replace(pool_batches=pool_batches), self.world, self._seed)

    def _nearer_tier(self) -> Tier | None:
        """The tier that data.tier=auto would choose, if it is nearer to the device than the one in use."""
        sources = (self.parts.source, self.parts.val_source)
        n_values = [int(lengths.sum(dtype=np.int64)) for source in sources for lengths in source.lengths.values()]
        can_stay = not self.sizes.uses_workers and max(n_values, default=0) <= MAX_VALUES
        tier = choose_tier("auto", self.sizes.room, self.parts.source.name, can_stay)
        return tier if TIERS.index(tier) > TIERS.index(self.sizes.tier) else None

    def _time_step(self, transform: Callable[[Rows], Rows]) -> float:
        """Seconds per step on one batch, with this transform."""
        work = steps_of(lambda: self.loop.train_step(transform(self.loop.batch)))
        return self.meter.timing(work, ceilings.STEPS_AT_ONCE).median

    def _show(self, text: str) -> None:
        """Replace the line at the bottom of the terminal, if there is one."""
        if self.world.is_main and sys.stderr.isatty():
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _make_loop(parts: "Parts", program: Program, batch: Rows, world: World) -> Loop:
    local_parts = parts
    if world.world_size > 1:
        local_parts = parts._replace(ddp=parts.model)
        if parts.config.train.compile:  # so far only DDP around the model is compiled
            parts.model.compile()
    rng = reseed(world, parts.config.run.seed)
    echo = parts.config.data.echo
    return Loop(
        transform=lambda rows: parts.workload.transform(rows, rng),
        train_step=lambda rows: program.train_step(parts, rows, 0.0),  # a learning rate of 0 keeps the weights
        local_step=lambda rows: program.train_step(local_parts, rows, 0.0),
        batch=batch,
        batch_size=parts.sizes.batch_size,
        echo=1.0 if echo == "auto" else echo,
    )
