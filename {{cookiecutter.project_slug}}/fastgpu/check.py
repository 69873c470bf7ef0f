"""`train.py --check`: everything that can be checked before a job of many processes starts, in a few seconds.

It calls what training calls, so it gives the same message and the same exit code for the same mistake.
"""

import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import lcm
from pathlib import Path

import torch
from torch import nn

import workloads
from fastgpu.feed.sizes import choose_canonical_ranks, choose_rank_batch, choose_sizes
from fastgpu.feed.sources import open_sources
from fastgpu.feed.tiers import make_order, pool_capacity
from fastgpu.process.config import Config, Data, Optim, Run
from fastgpu.process.config_loader import read_options
from fastgpu.process.launch import Launch, UserError, planned_world_sizes
from fastgpu.process.machine import format_bytes
from fastgpu.process.world import World, join
from fastgpu.rows.contract import Source
from fastgpu.run.checkpoint import KEEP_LAST
from fastgpu.run.describe import describe_feed
from fastgpu.run.folder import create_folder, find_changes, find_folder, refuse_another
from workloads import Workload

MOMENTS = {"adamw": 2, "lamb": 2, "sgd": 1}
"""{optimizer: values that it keeps for each weight}"""


class PlannedWorld(World):
    """A job that has not been started: it has the number of its processes, and none to talk to."""

    @contextmanager
    def raise_on_every_rank(self) -> Iterator[None]:
        """An error of this process is that of the job."""
        yield

    def check_same(self, values: Mapping[str, object], cure: str = "") -> None:
        """There is no other process to compare with."""


def check(cfg: Config, launch: Launch) -> None:
    """Check config, files, batch, workload, model and run folder for a job of `launch.world_size` processes.

    Nothing of the run is written, and no process group is made. Raises UserError as training would.
    """
    t0 = time.perf_counter()
    with join(launch._replace(world_size=1), cfg.dist) as alone:
        world = PlannedWorld(launch.rank, launch.world_size, launch.local_world_size, alone.device)
    options = read_options(cfg, workloads.load(cfg.workload).Options)
    sources = open_sources(cfg.data, cfg.loader, cfg.hdf5, world)
    workload = workloads.make(cfg.workload, options, sources, world)
    sizes = choose_sizes(cfg.data, cfg.loader, sources, world, accumulation=cfg.optim.accumulation_steps)
    _check_world_sizes(planned_world_sizes(launch), cfg.data, sources[0], cfg.optim.accumulation_steps)
    orders = (make_order(sources[0], sizes, world, cfg.run.seed), make_order(sources[1], sizes, world, None))
    world.print_once(f"{world}\n{describe_feed(sources[0], sizes, orders[0])}")
    for key, source, order in zip(("data.train", "data.val"), sources, orders, strict=True):
        decoder = source.open_decoder(order, world.device)
        pool_capacity(decoder.encoded if decoder else source, order)
        n_files, n_verified = source.check_files()
        files = f"; the first block of {n_files} files is read, and verified in {n_verified}" if n_files else ""
        world.print_once(f"{key}: {len(source):,} rows{files}")
    model = _model_without_weights(workload)
    n_weights = sum(parameter.numel() for parameter in model.parameters())
    world.print_once(workload.summary)
    world.print_once(f"model: {n_weights:,} weights")
    resolved = cfg.resolved(data=sizes.data_values(), model=options.model_dump())
    free = _check_folder(cfg.run, resolved.flat(), _checkpoint_bytes(model, cfg.optim, bool(cfg.train.ema)))
    world.print_once(f"run.folder: {format_bytes(free)} free in {cfg.run.folder}")
    world.print_once(f"checked in {time.perf_counter() - t0:.1f} s; nothing was started")


def _check_world_sizes(world_sizes: list[int], data: Data, source: Source, accumulation: int) -> None:
    """Check that a job can change its size inside an epoch: the batches must be the same for all numbers of ranks."""
    canonical_ranks = {}
    for world_size in world_sizes:
        choose_rank_batch(data.batch_size, world_size, accumulation, source)
        chosen = choose_canonical_ranks(data.canonical_ranks, data.batch_size, world_size, source)
        canonical_ranks[chosen] = world_size
    if len(canonical_ranks) > 1:
        meanings = ", ".join(f"{number} for {world_size} ranks" for number, world_size in canonical_ranks.items())
        raise UserError(
            f"data.canonical_ranks is {data.canonical_ranks}, which means {meanings}: the batches would change with "
            f"the number of nodes (PET_NNODES); set data.canonical_ranks={lcm(*world_sizes)}, which must divide "
            f"data.batch_size ({data.batch_size})"
        )


def _model_without_weights(workload: Workload) -> nn.Module:
    """The model on the meta device: shapes only. Models that look at their own weights are made on the CPU."""
    try:
        with torch.device("meta"):
            return workload.model()
    except (NotImplementedError, RuntimeError):
        return workload.model()


def _checkpoint_bytes(model: nn.Module, optim: Optim, has_average: bool) -> int:
    """About the bytes of a checkpoint: weights to resume, weights to use, their average, state of the optimizer."""
    tensors = [*model.parameters(), *model.buffers()]
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    return (2 + has_average) * sum(tensor.nbytes for tensor in tensors) + MOMENTS[optim.name] * trained


def _check_folder(settings: Run, config: dict[str, object], checkpoint_bytes: int) -> int:
    """Check that the run may start and that its checkpoints have room. Returns the free bytes."""
    runs = Path(settings.folder)
    create_folder(runs)
    run = find_folder(settings)
    if settings.resume == "auto":
        refuse_another(run, settings, find_changes(run, config))
    free = shutil.disk_usage(runs).free
    own = sum(path.stat().st_size for path in run.glob("checkpoints/*/*"))
    need = (KEEP_LAST + 2) * checkpoint_bytes
    if need > free + own:
        raise UserError(
            f"run.folder is {settings.folder}, where {format_bytes(free)} are free, but the checkpoints of this model "
            f"take about {format_bytes(need)}; make room, use another run.folder, or a smaller model"
        )
    return free
