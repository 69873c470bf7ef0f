"""Train on rows that are on the device before the step asks for them.

python train.py                                             one process: a CPU or one GPU
torchrun --standalone --nproc-per-node=gpu train.py         on a machine with GPUs: all of them
python train.py run.check=true data.batch_size=512          build data and model, and stop: train and write nothing
python train.py data.batch_size=512 train.epochs=3          any key of config.yaml; --help lists them
"""

import sys

import workloads
from fastgpu.process.config_loader import load_config, read_options
from fastgpu.process.launch import UserError, exit_with_message
from fastgpu.run.folder import refuse_taken

if __name__ == "__main__":  # before torch, whose import takes seconds: a mistake in the config is reported at once
    with exit_with_message():
        config = load_config(sys.argv[1:], workloads.find_options)
        refuse_taken(config.run)

from functools import partial
from itertools import islice
from math import cos, isfinite, pi
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fastgpu.feed import Feed, Sizes, choose_sizes, echo, open_loaders, open_splits
from fastgpu.process.config import Config, Optim
from fastgpu.process.world import World, init_distributed
from fastgpu.rows import BlockSampler, Dataset, Rows, Shard, echo_passes
from fastgpu.run.checkpoint import Stateful
from fastgpu.run.record import describe_feed, identify_job
from fastgpu.run.run import Run
from fastgpu.telemetry import Clock, Monitor, TensorBoard
from fastgpu.training import (
    AveragedModel,
    MixedPrecision,
    OptimizerState,
    apex_optimizer,
    evaluate,
    make_seed,
    micro_batches,
    mixed_precision,
    reseed,
    settle_buckets,
    share_gradients,
    to_device,
)


class Parts(NamedTuple):
    """What the loop is made of. diagnose.py measures these very objects."""

    config: Config  # `auto` is replaced by what was chosen: precision, tier, sizes, readers
    sizes: Sizes
    train_rows: Dataset
    val_rows: Dataset
    loader: Feed  # PrefetchLoader: pools are read ahead. ResidentLoader: all rows stay on the device
    val_loader: Feed
    workload: workloads.Workload
    model: nn.Module
    ddp: nn.Module  # the same model; it averages the gradients over the ranks
    optimizer: torch.optim.Optimizer
    precision: MixedPrecision
    ema: AveragedModel | None = None  # its weights, averaged over the steps

    def model_to_use(self) -> nn.Module:
        """The model that is validated and saved for use: the averaged one, if there is one."""
        return self.ema.module if self.ema and self.ema.has_average else self.model

    @property
    def state(self) -> dict[str, Stateful]:
        """What a checkpoint needs for resuming."""
        averaged: dict[str, Stateful] = {"ema": self.ema} if self.ema else {}
        return {"model": self.model, "step": OptimizerState(self.optimizer, self.precision.scaler), **averaged}


def build(cfg: Config, world: World) -> Parts:
    with world.together():  # a UserError of one rank, such as a missing file, ends every rank with its message
        train_rows, val_rows = open_splits(cfg.data, cfg.loader, cfg.run.seed)  # HDF5Dataset, or your own torch Dataset
        kind = workloads.load(cfg.workload)
        options = read_options(cfg, kind.Options)
        workload = kind(options, train_rows, val_rows)
        sizes = choose_sizes(cfg, train_rows, val_rows, world)
        shard = Shard(world.rank, world.world_size, sizes.canonical_ranks)  # a DistributedSampler, but of blocks
        sampler = BlockSampler(train_rows, sizes.batch_size, shard, sizes.pool_batches, seed=cfg.run.seed)
        shard = Shard(world.rank, world.world_size)
        val_sampler = BlockSampler(val_rows, sizes.batch_size, shard, sizes.pool_batches, seed=None)  # in order, all
        sampler.n_epochs = val_sampler.n_epochs = cfg.train.epochs  # no rows are read ahead for an epoch after the last
        splits, samplers = (train_rows, val_rows), (sampler, val_sampler)
        loader, val_loader = open_loaders(splits, samplers, sizes, world.device, loader=cfg.loader)
        torch.manual_seed(cfg.run.seed)
        model = to_device(workload.model(), world.device)
        optimizer = make_optimizer(model, cfg.optim)
        precision = mixed_precision(cfg.train.precision, world.device, optimizer)
    world.check_same(identify_job(cfg.flat(), splits, sampler, precision.name))
    ema = AveragedModel(model, cfg.train.ema) if cfg.train.ema else None
    ddp = share_gradients(model, cfg.dist, world, train_rows)  # DistributedDataParallel if there are several ranks
    if cfg.train.compile:
        ddp.compile()
    chosen = {**sizes.chosen, "model": options.model_dump(), "train": {"precision": precision.name}}
    world.print_once(describe_feed(train_rows, sizes, sampler))
    world.print_once(workload.summary)
    parts = (*splits, loader, val_loader, workload, model, ddp, optimizer, precision, ema)
    return Parts(cfg.resolved(**chosen), sizes, *parts)


def make_optimizer(model: nn.Module, optim: Optim) -> torch.optim.Optimizer:
    """All with fused kernels. Another optimizer: a branch here, and its name in `Optim.name`."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},  # biases and norms
    ]
    if optim.name == "adamw":
        return torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.momentum, 0.999), fused=True)
    if optim.name == "sgd":
        return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum, nesterov=optim.momentum > 0, fused=True)
    return apex_optimizer(groups, optim)  # fused_adam or fused_lamb of NVIDIA Apex


def learning_rate(share: float, optim: Optim) -> float:
    """A linear rise, then a cosine to 0, a line to 0, or the peak. share: fresh rows / those of the whole run, so that
    echoing a batch changes nothing here."""
    if share < optim.warmup_share:
        return optim.lr * (share / optim.warmup_share)
    fall = min(1.0, (share - optim.warmup_share) / max(1e-9, 1 - optim.warmup_share))
    if optim.schedule == "cosine":
        return optim.lr * (0.5 * (1 + cos(pi * fall)))
    return optim.lr * (1 - fall) if optim.schedule == "linear" else optim.lr


def backward(parts: Parts, batch: Rows) -> Tensor:
    """Forward and backward. Returns the mean loss on the device: nothing here waits for it."""
    accumulation_steps = parts.config.optim.accumulation_steps
    losses = []
    for part, sync in micro_batches(batch, accumulation_steps, parts.ddp):
        with sync:  # gradients are averaged over the ranks with the last part only
            with parts.precision.autocast:
                loss = parts.workload.loss(parts.ddp, part) / accumulation_steps
            parts.precision.scaler.scale(loss).backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def train_step(parts: Parts, batch: Rows, lr: float) -> dict[str, Tensor]:
    """Forward, backward, update. Returns what is logged of it, {tag: scalar on the device}: nothing here waits."""
    optimizer, scaler = parts.optimizer, parts.precision.scaler
    for group in optimizer.param_groups:
        group["lr"] = lr
    numbers = {"train/loss": backward(parts, batch)}
    if max_norm := parts.config.optim.clip_grad_norm:
        scaler.unscale_(optimizer)
        numbers["train/grad_norm"] = nn.utils.clip_grad_norm_(parts.model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    if parts.ema:
        parts.ema.update_parameters(parts.model)
    optimizer.zero_grad()
    return numbers


def train(parts: Parts, world: World) -> int:
    """Train to the end, or until a signal asks for a stop. Returns the exit code."""
    cfg, order, workload = parts.config, parts.loader.order, parts.workload
    planned_rows = cfg.train.epochs * order.total_size
    with Run(parts, world) as run, TensorBoard(run, planned_rows, world) as board, Monitor(world) as monitor:
        at = run.progress  # epoch, pool of the epoch, steps on it; zeros for a new run
        clock = Clock(world)
        steps: list[dict[str, Tensor]] = []  # since the last report

        def report(lr: float) -> None:
            """Log the means of these steps. In a pool, the host waits for the device only here."""
            means = world.means({tag: torch.stack([step[tag] for step in steps]).mean() for tag in steps[0]})
            steps.clear()
            if not isfinite(loss := means["train/loss"]):
                raise UserError(
                    f"the loss is {loss} at step {at.step}; lower optim.lr ({cfg.optim.lr}) or optim.clip_grad_norm"
                )
            board.write(at.step, {**means, "train/lr": lr, **monitor.take()}, clock.take())

        has_settled = world.world_size <= 2  # two summands have one order
        while at.epoch < cfg.train.epochs:
            for pool in clock.timed(parts.loader.pools(at.epoch, at.pool)):
                place = cfg.run.seed, at.epoch, at.pool  # of which all that is drawn at random is a function
                passes = echo_passes(cfg.data.echo, at.epoch * order.pools_per_epoch + at.pool)  # 2.5: 2, 3, 2, 3, ...
                fresh = cfg.data.batch_size / passes  # rows of an echoed batch that count as fresh ones
                first_row = at.epoch * order.total_size + order.rows_before(at.pool)
                batches = echo(pool.rows, parts.sizes.batch_size, passes, make_seed(world, *place))
                for number, batch in islice(enumerate(batches), at.pool_steps, None):  # after those of a resumed run
                    lr = learning_rate((first_row + (number + 0.5) * fresh) / planned_rows, cfg.optim)
                    rows = workload.transform(batch, reseed(world, *place, number))
                    if not has_settled:  # or a resumed run would add up the ranks' gradients in another order
                        settle_buckets(parts.model, world, partial(backward, parts, rows))
                        has_settled = True
                    steps.append(train_step(parts, rows, lr))
                    run.count()  # at.step, at.pool_steps
                    clock.count(fresh, cfg.data.batch_size)
                    board.count(fresh)
                    if len(steps) == cfg.log.every_steps:
                        report(lr)
                    if run.is_asked_to_stop():
                        if steps:
                            report(lr)
                        return run.stop()  # saves this very step
                run.end_pool()  # at.pool; saves if run.checkpoint_every_steps says so
            if steps:
                report(lr)
            pools = run.until_asked_to_stop(parts.val_loader.pools(at.epoch))
            model, autocast = parts.model_to_use(), parts.precision.autocast
            metrics = evaluate(model, workload, pools, world, batch_size=parts.sizes.batch_size, autocast=autocast)
            if run.is_asked_to_stop():
                return run.stop()
            run.end_epoch(metrics)  # at.epoch; saves the last checkpoint, and the best one
            board.end_epoch(f"{at.epoch}/{cfg.train.epochs}", at.step, metrics)
            clock.restart()
        return run.finish()


if __name__ == "__main__":
    with exit_with_message(), init_distributed(config.dist) as world:  # nccl between GPUs, gloo between CPUs
        parts = build(config, world)
        exit_code = 0 if config.run.check else train(parts, world)
    sys.exit(exit_code)
