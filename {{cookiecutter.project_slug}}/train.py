"""Train on rows that are on the device before the step asks for them.

python train.py                                             one process: a CPU or one GPU
torchrun --standalone --nproc-per-node=gpu train.py         every GPU of this machine
python train.py data.batch_size=512 train.epochs=3          any key of config.yaml; --help lists them
"""

import sys

import workloads
from fastgpu.process.config_loader import load_config, read_options
from fastgpu.process.launch import exit_with_message, read_launch

if __name__ == "__main__":  # before torch, whose import takes seconds: a mistake in the config is reported at once
    launch = read_launch()
    with exit_with_message(launch):
        config = load_config(sys.argv[1:], workloads.find_options)

from contextlib import closing
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fastgpu.feed.echo import echo, echo_passes, free_echo
from fastgpu.feed.sizes import Sizes, choose_sizes
from fastgpu.feed.tiers import Feed, Placement, make_feed
from fastgpu.process.config import Config
from fastgpu.process.world import World, join
from fastgpu.rows.contract import Source
from fastgpu.rows.order import BlockSampler, Shard
from fastgpu.rows.rows import Rows
from fastgpu.storage.sources import open_source
from fastgpu.telemetry.checkpoint import Stateful
from fastgpu.telemetry.describe import describe_feed
from fastgpu.telemetry.run import open_run
from fastgpu.training.apex import choose_kernels
from fastgpu.training.evaluate import evaluate
from fastgpu.training.optim import make_optimizer
from fastgpu.training.parallel import reseed, share_gradients, unused_gpus_hint
from fastgpu.training.step import MixedPrecision, OptimizerState, lr_factor, micro_batches, mixed_precision, to_device
from workloads import Workload


class Parts(NamedTuple):
    """What the loop is made of. diagnose.py measures these very objects."""

    config: Config  # with a number for every `auto`
    source: Source
    val_source: Source
    sizes: Sizes
    feed: Feed
    val_feed: Feed
    workload: Workload
    model: nn.Module  # as it is saved and validated
    ddp: nn.Module  # the same model; it averages the gradients over the ranks
    optimizer: torch.optim.Optimizer
    precision: MixedPrecision


def build(cfg: Config, world: World) -> Parts:
    # ------------------------------------------------------------ rows: files, or your Dataset, as blocks
    workload_class = workloads.load(cfg.workload)
    with world.raise_on_every_rank():
        options = read_options(cfg, workload_class.Options)
        source = open_source(cfg.data, "train", cfg.loader, cfg.hdf5)
        val_source = open_source(cfg.data, "val", cfg.loader, cfg.hdf5)
        workload = workload_class(options, source, val_source)
        sizes = choose_sizes(
            cfg.data, cfg.loader, (source, val_source), world, accumulation=cfg.optim.accumulation_steps
        )

    # ------------------------------------------------------------ feed: blocks -> pools of shuffled rows on the device
    shard = Shard(world.rank, world.world_size, sizes.canonical_ranks)
    order = BlockSampler(
        source.block_rows, sizes.batch_size, shard=shard, pool_batches=sizes.pool_batches, seed=cfg.run.seed
    )
    val_shard = Shard(world.rank, world.world_size)
    val_order = BlockSampler(
        val_source.block_rows,
        sizes.batch_size,
        shard=val_shard,
        pool_batches=sizes.pool_batches,
        seed=None,
        drop_last=False,
    )
    placement = Placement(sizes.tier, world.device, sizes.n_readers)
    with world.raise_on_every_rank():
        feed = make_feed(source, order, placement, cfg.loader)
        val_feed = make_feed(val_source, val_order, placement, cfg.loader)
        kernels = choose_kernels(cfg.optim)
    world.check_equal(kernels, "install NVIDIA Apex on every machine, or set optim.fused=torch")

    # ------------------------------------------------------------ model
    torch.manual_seed(cfg.run.seed)
    model = to_device(workload.model(), world.device, cfg.train.channels_last)
    optimizer = make_optimizer(model, cfg.optim, kernels)
    precision = mixed_precision(cfg.train.precision, world.device)
    has_ragged = any(field.is_ragged for field in source.fields.values())
    static_graph = cfg.optim.accumulation_steps == 1
    ddp = share_gradients(model, cfg.dist, world, static_graph=static_graph, has_ragged=has_ragged)
    if cfg.train.compile:
        ddp.compile()
    resolved = cfg.resolved(
        data=sizes.data_values(),
        loader=sizes.loader_values(),
        model=options.model_dump(),
        train={"precision": precision.name},
    )
    return Parts(resolved, source, val_source, sizes, feed, val_feed, workload, model, ddp, optimizer, precision)


def train_step(parts: Parts, batch: Rows, lr: float) -> Tensor:
    """Forward, backward, update. Returns the mean loss on the device: nothing here waits for it."""
    accumulation_steps = parts.config.optim.accumulation_steps
    max_norm = parts.config.optim.clip_grad_norm
    optimizer = parts.optimizer
    scaler = parts.precision.scaler
    for group in optimizer.param_groups:
        group["lr"] = lr
    losses = []
    for part, sync in micro_batches(batch, accumulation_steps, parts.ddp):
        with sync:  # gradients are averaged over the ranks with the last part only
            with parts.precision.autocast:
                loss = parts.workload.loss(parts.ddp, part) / accumulation_steps
            scaler.scale(loss).backward()
        losses.append(loss.detach())
    if max_norm:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parts.model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return torch.stack(losses).sum()


def train(cfg: Config, world: World) -> None:
    parts = build(cfg, world)
    feed, workload, order = parts.feed, parts.workload, parts.feed.order
    batch_size = parts.sizes.batch_size
    planned_rows = cfg.train.epochs * order.total_size
    state: dict[str, Stateful] = {"model": parts.model, "step": OptimizerState(parts.optimizer, parts.precision.scaler)}

    with closing(feed), closing(parts.val_feed), open_run(cfg.run, state, order, world) as run:
        progress = run.progress
        if cfg.data.echo != "auto":
            progress.echo = cfg.data.echo
        settings = parts.config.flat() | {"data.echo": progress.echo}
        world.print_once(f"{run.folder}: {world}, {parts.precision.name}, at step {progress.step}")
        world.print_once(describe_feed(parts.source, parts.sizes, cfg.data.batch_size))
        run.start(settings, parts.source.row_bytes, workload.card())

        while progress.epoch < cfg.train.epochs:
            read_before = feed.read_time
            for pool in run.clock.timed(feed.pools(progress.epoch, progress.consumed)):
                rng = reseed(world, cfg.run.seed, progress.epoch, pool.plan.number)
                passes = echo_passes(progress.echo, progress.epoch * order.pools_per_epoch + pool.plan.number)
                fresh_rows = float(progress.epoch * order.total_size + progress.consumed)
                rows_per_step = cfg.data.batch_size / passes  # fresh rows: an echoed batch counts for a part only
                for batch in echo(pool.rows, batch_size, passes, rng):
                    middle = (fresh_rows + rows_per_step / 2) / planned_rows
                    lr = cfg.optim.lr * lr_factor(middle, cfg.optim.warmup_share)
                    loss = train_step(parts, workload.transform(batch, rng), lr)
                    fresh_rows += rows_per_step
                    run.count(loss, rows_per_step, cfg.data.batch_size)
                    if run.clock.steps == cfg.log.every_steps:
                        run.report(fresh_rows, lr)  # the only place where the host waits for the device
                progress.consumed = pool.plan.consumed
                run.save_if_due(parts.model)
            if run.clock.steps:  # none are left if the run was resumed at the end of an epoch
                run.report(fresh_rows, lr)

            pools = parts.val_feed.pools(progress.epoch)
            autocast = parts.precision.autocast
            metrics = evaluate(parts.model, workload, pools, batch_size=batch_size, autocast=autocast, world=world)
            if cfg.data.echo == "auto" and run.epoch_throughput.trained_rows:
                read_s = world.all_reduce_max(feed.read_time.since(read_before).s_per_row)
                train_s = run.epoch_throughput.train_s_per_row * world.world_size
                run.set_echo(free_echo(read_s, train_s, workload.is_random))
            run.end_epoch(parts.model, metrics, workload.metrics)
        run.finish()


if __name__ == "__main__":
    with exit_with_message(launch), join(launch, config.dist) as world:
        world.print_once(unused_gpus_hint(world, config.dist, " ".join(sys.argv)))
        train(config, world)
