"""Train on rows that are on the device before the step asks for them.

python train.py                                             one process: a CPU or one GPU
torchrun --standalone --nproc-per-node=gpu train.py         every GPU of this machine
python train.py data.batch_rows=512 train.epochs=3          any key of config.yaml; --help lists them
"""

import sys
from typing import Any

from fastgpu.process.config import Config
from fastgpu.process.config_loader import flat, load_config
from fastgpu.process.launch import clear_exit, read_launch

if __name__ == "__main__":  # before torch, whose import takes seconds: a typo in the config is told at once
    launch = read_launch()
    with clear_exit(launch):
        config = load_config(sys.argv[1:])

import torch

import workloads
from fastgpu.diagnose.tune import settle_readers
from fastgpu.feed import sizes as auto
from fastgpu.feed.echo import auto_factor, echo, times_of_pool
from fastgpu.feed.tiers import make_feed
from fastgpu.process.world import World, join
from fastgpu.rows.order import BlockSampler
from fastgpu.storage.sources import opener
from fastgpu.telemetry import checkpoint, runs
from fastgpu.telemetry.clock import Clock, Lap
from fastgpu.telemetry.log import Log, listed
from fastgpu.telemetry.monitor import Monitor
from fastgpu.training import apex
from fastgpu.training.evaluate import evaluate
from fastgpu.training.optim import make_optimizer, schedule
from fastgpu.training.parallel import hint, wrap
from fastgpu.training.step import Step, check_finite, choose_precision


def open_rows(cfg: Config, world: World) -> tuple[Any, Any, Any, auto.Sizes]:
    """Rows to train on and to validate with, what is done with them, and in which portions they move."""
    data = cfg.data
    open_source = opener(data.dataset, data.verify, data.trust_links, cfg.hdf5.model_dump(), cfg.loader.model_dump())
    with world.together():
        rows = open_source("data.train", data.train, data.fields)
        val_rows = open_source("data.val", data.val, data.val_fields or data.fields)
        sizes = auto.sizes(rows, val_rows, world.size, world.local_size, world.device, cfg.optim.accumulation,
                           data.tier, data.batch_rows, data.lanes, data.pool_batches, data.readers, cfg.loader.workers,
                           cfg.loader.prefetch_factor, data.prefetch_pools)  # fmt: skip
        workload = workloads.make(cfg.workload, rows, val_rows, cfg.options)
    return rows, val_rows, workload, settle_readers(rows, sizes, world, cfg.run.seed)


def make_step(cfg: Config, world: World, workload: Any) -> tuple[Any, Step, str]:
    """The model on the device, what trains it, and a line about NVIDIA Apex if there is something to say."""
    with world.together():
        kernels, why = apex.choose(cfg.optim.fused, cfg.optim.name)
    world.agree(kernels, "install NVIDIA Apex on every machine, or set optim.fused=torch")
    torch.manual_seed(cfg.run.seed)
    layout = torch.channels_last if cfg.train.channels_last else torch.contiguous_format
    model = workload.model().to(world.device, memory_format=layout)
    optimizer = make_optimizer(model, cfg.optim.name, cfg.optim.lr, cfg.optim.weight_decay, cfg.optim.momentum, kernels)
    precision = choose_precision(cfg.train.precision, world.device)
    shared = wrap(world, model, cfg.dist.strategy, cfg.optim.accumulation == 1, cfg.train.compile)
    step = Step(shared, workload.loss, optimizer, precision, world.device, cfg.optim.accumulation, cfg.optim.clip_norm)
    return model, step, why


def train(cfg: Config, world: World) -> None:
    # ---------------------------------------------------------------- Rows on the device, model, the run's folder
    rows, val_rows, workload, sizes = open_rows(cfg, world)
    ranks: dict[str, Any] = {"rank": world.rank, "world_size": world.size, "pool_batches": sizes.pool_batches}
    order = BlockSampler(rows.block_rows, sizes.batch_rows, lanes=sizes.lanes, seed=cfg.run.seed, **ranks)
    val_order = BlockSampler(val_rows.block_rows, sizes.batch_rows, shuffle=False, drop_last=False, **ranks)
    where = (sizes.tier, world.device, sizes.readers, cfg.data.prefetch_pools, cfg.data.pin_memory)
    with world.together():
        feed, val_feed = make_feed(rows, order, *where), make_feed(val_rows, val_order, *where)
    model, step, why = make_step(cfg, world, workload)
    resume, parts = cfg.run.resume == "auto", {"model": model, "step": step}
    with world.together():
        mine = runs.open_run(cfg.run.folder, cfg.run.name, resume) if world.is_first else None
    folder = world.from_first(mine)
    with world.together():
        at = checkpoint.resume(folder, parts, order.identity, world.device) if resume else checkpoint.Progress()
    world.agree(at, f"put run.folder ({cfg.run.folder}) on a file system that all nodes share")
    at.echo = at.echo if cfg.data.echo == "auto" else cfg.data.echo
    resolved = flat(cfg) | auto.resolved(sizes, rows.in_workers, step.precision) | {"data.echo": at.echo}
    runs.describe_run(mine, resolved)
    monitor = Monitor(world.gpus, world.by_machine)
    world.say(f"{folder}: {world}, {step.precision}, at step {at.step}\n{sizes.text}{workload.note}{why}{monitor.note}")
    planned_rows = cfg.train.epochs * order.total_size
    log = Log(mine, planned_rows, at.epoch * order.total_size + at.consumed, resolved, f"{world}, {rows.row_bytes} B")
    clock, losses, metrics = Clock(world.device), list[torch.Tensor](), dict[str, float]()

    def report(fresh: float, lr: float) -> Lap:
        """Log the steps since the last report: the only place of the loop where the host waits for the device."""
        loss = world.sum(torch.stack(losses).mean()).item() / world.size
        losses.clear()
        check_finite(loss, at.step, cfg.optim.lr)
        lap = clock.lap(world.max)
        log.scalars(at.step, {"train/loss": loss, "train/lr": lr} | lap.scalars() | monitor.scalars(lap.rows_per_s))
        log.progress(fresh, f"epoch {at.epoch + 1}/{cfg.train.epochs} step {at.step} loss {loss:.4f} {lap}")
        return lap

    def save(kind: checkpoint.Kind) -> bool:
        world.average_buffers(model)
        return not world.is_first or checkpoint.save(folder, kind, at, parts, order.identity)

    # ---------------------------------------------------------------- Loop: epochs > pools > batches
    saved, saved_step = True, at.step
    while at.epoch < cfg.train.epochs:
        epoch_lap, fresh = Lap(), float(at.epoch * order.total_size + at.consumed)
        for pool in clock.waits(feed.pools(at.epoch, at.consumed)):
            rng = world.reseed(cfg.run.seed, at.epoch, pool.plan.number)
            times = times_of_pool(at.echo, at.epoch * order.pools_an_epoch + pool.plan.number)
            fresh, step_rows = float(at.epoch * order.total_size + at.consumed), cfg.data.batch_rows / times
            for batch in echo(pool.rows, sizes.batch_rows, times, rng):
                lr = cfg.optim.lr * schedule((fresh + step_rows / 2) / planned_rows, cfg.optim.warmup)
                losses.append(step(workload.transform(batch, rng), lr))
                at.step, fresh = at.step + 1, fresh + step_rows
                clock.count(step_rows, cfg.data.batch_rows)
                if clock.steps == cfg.log.every_steps:
                    epoch_lap = epoch_lap.plus(report(fresh, lr))
            at.consumed = pool.plan.consumed
            if cfg.run.checkpoint_every_steps and at.step - saved_step >= cfg.run.checkpoint_every_steps:
                saved, saved_step = save("last"), at.step
        if clock.steps:
            epoch_lap = epoch_lap.plus(report(fresh, lr))
        metrics = evaluate(model, workload, val_feed.pools(at.epoch), sizes.batch_rows, step.cast, world)
        if cfg.data.echo == "auto" and epoch_lap.trained_rows:  # for the next epoch
            at.echo = auto_factor(world.max(feed.supply_s()), epoch_lap.train_s * world.size, workload.redraws)
            runs.write_config(mine, resolved | {"data.echo": at.echo})
        is_best = at.end_epoch(metrics[f"val/{workload.best}"])
        saved, saved_step = save("last"), at.step
        if is_best:
            save("best")
        log.scalars(at.step, metrics)
        log.progress(fresh, f"epoch {at.epoch}/{cfg.train.epochs} {listed(metrics)}, {epoch_lap}", important=True)
        clock.restart()

    # ---------------------------------------------------------------- Close
    world.say(log.finish(resolved | {"data.echo": at.echo}, metrics))
    for each in (feed, val_feed, monitor):
        each.close()
    world.require(saved, f"the run is over, but its last checkpoint is not in {folder}: make room, and resume it")
    world.say(
        f"done: epoch {at.epoch}, step {at.step}; {folder}/report.html; charts: tensorboard --logdir {cfg.run.folder}"
    )


if __name__ == "__main__":
    with clear_exit(launch), join(launch, config.dist.device, config.dist.timeout_s) as world:
        world.say(hint(world, config.dist.strategy, " ".join(sys.argv)))
        train(config, world)
