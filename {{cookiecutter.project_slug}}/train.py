"""Train on rows that are on the device before the step asks for them.

python train.py                                          one process: a CPU or one GPU
torchrun --standalone --nproc-per-node=gpu train.py      every GPU of this machine
python train.py data.batch_size=512 train.epochs=3       any key of config.yaml; docs/config.md explains them
"""

import sys

from fastgpu.process.config_loader import load_config
from fastgpu.process.launch import UserError, exit_with_message

if __name__ == "__main__":  # before torch, whose import takes seconds: a mistake in the config is reported at once
    with exit_with_message():
        config = load_config(sys.argv[1:])

from itertools import islice
from math import cos, isfinite, pi
from typing import NamedTuple

import torch
from torch import Tensor, nn

import workloads
from fastgpu.feed import PrefetchLoader, ResidentLoader, Sizes, choose_sizes, echo, open_loaders, open_splits
from fastgpu.process.config import Config, Optim
from fastgpu.process.world import World, init_distributed
from fastgpu.rows import BlockSampler, Dataset, Rows, Shard, echo_passes
from fastgpu.run import Run, describe_feed, identify_job
from fastgpu.telemetry import Clock, Monitor, TensorBoard
from fastgpu.training import AveragedModel, apex_optimizer, evaluate, mean_over_ranks, share_gradients
from fastgpu.training.step import MixedPrecision, make_seed, micro_batches, mixed_precision, reseed, to_device


class Parts(NamedTuple):
    """What the loop is made of. diagnose.py measures these very objects."""

    config: Config  # with the value that was chosen in place of each `auto`
    sizes: Sizes
    train_rows: Dataset
    val_rows: Dataset
    loader: PrefetchLoader | ResidentLoader  # pools are read ahead, or all rows stay on the device
    val_loader: PrefetchLoader | ResidentLoader
    workload: workloads.Workload
    model: nn.Module
    ddp: nn.Module  # the model, or what wraps it for forward passes, to average the gradients over several ranks
    optimizer: torch.optim.Optimizer
    precision: MixedPrecision
    ema: AveragedModel  # its weights, averaged over the steps: ema.module is validated, and saved for use


def build(cfg: Config, world: World) -> Parts:
    with world.together():  # a UserError of one rank, such as a missing file, ends every rank with its message
        splits = train_rows, val_rows = open_splits(cfg.data, cfg.run.seed)  # HDF5Dataset, or ItemDataset of yours
        workload = workloads.make(cfg, train_rows, val_rows)
        sizes = choose_sizes(cfg, train_rows, val_rows, world)
        shard = Shard(world.rank, world.world_size, sizes.canonical_ranks)
        sampler = BlockSampler(train_rows, sizes.batch_size, shard, sizes.pool_batches, seed=cfg.run.seed)
        val_shard = Shard(world.rank, world.world_size)
        val_sampler = BlockSampler(val_rows, sizes.batch_size, val_shard, sizes.pool_batches, seed=None)  # unshuffled
        sampler.n_epochs = val_sampler.n_epochs = cfg.train.epochs  # no rows are read ahead for an epoch after the last
        loader, val_loader = open_loaders(splits, (sampler, val_sampler), sizes, world.device, loader=cfg.loader)
        torch.manual_seed(cfg.run.seed)
        model = to_device(workload.model(), world.device)
        optimizer = make_optimizer(model, cfg.optim)
        precision = mixed_precision(cfg.train.precision, world.device, optimizer)
    cfg = cfg.resolved(**sizes.chosen, model=workload.options.model_dump(), train={"precision": precision.name})
    world.check_same(identify_job(cfg.flat(), splits, sampler))
    world.print_once(describe_feed(train_rows, sizes, sampler))
    ema = AveragedModel(model, cfg.train.ema)  # a decay of 0: the model itself
    ddp = share_gradients(model, cfg.dist, world, train_rows)  # DistributedDataParallel if there are several ranks
    if cfg.train.compile:
        ddp.compile()
    return Parts(cfg, sizes, *splits, loader, val_loader, workload, model, ddp, optimizer, precision, ema)


def make_optimizer(model: nn.Module, optim: Optim) -> torch.optim.Optimizer:
    """Each has fused kernels. Another optimizer: a branch here, and its name in `Optim.name`."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    others = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]  # biases and norms
    groups = [{"params": matrices, "weight_decay": optim.weight_decay}, {"params": others, "weight_decay": 0.0}]
    if optim.name == "adamw":
        return torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.momentum, 0.999), fused=True)
    if optim.name == "sgd":
        return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum, nesterov=optim.momentum > 0, fused=True)
    return apex_optimizer(groups, optim)  # fused_adam or fused_lamb of NVIDIA Apex


def learning_rate(share: float, optim: Optim) -> float:
    """A linear rise, then a cosine or a line to 0, or the peak. share: part of the run that is done, in steps."""
    rise = min(1.0, share / optim.warmup_share) if optim.warmup_share else 1.0
    fall = min(1.0, max(0.0, share - optim.warmup_share) / max(1e-9, 1 - optim.warmup_share))
    return optim.lr * rise * {"cosine": 0.5 * (1 + cos(pi * fall)), "linear": 1 - fall, "constant": 1.0}[optim.schedule]


def train_step(parts: Parts, batch: Rows, lr: float) -> dict[str, Tensor]:
    """Forward, backward, update. Nothing here waits. Returns what each step logs: {tag: scalar on the device}."""
    optim, optimizer, scaler = parts.config.optim, parts.optimizer, parts.precision.scaler
    for group in optimizer.param_groups:
        group["lr"] = lr  # 0 keeps the weights: diagnose.py steps with it
    numbers = {"train/loss": torch.zeros((), device=batch.device)}
    for part, sync in micro_batches(batch, optim.accumulation_steps, parts.ddp):
        with sync:  # gradients are averaged over the ranks with the last part only
            with parts.precision.autocast:
                loss = parts.workload.loss(parts.ddp, part) / optim.accumulation_steps
            scaler.scale(loss).backward()
        numbers["train/loss"] += loss.detach()
    scaler.unscale_(optimizer)  # from here on, gradients are what they seem in fp16, too
    if optim.clip_grad_norm:
        numbers["train/grad_norm"] = nn.utils.clip_grad_norm_(parts.model.parameters(), optim.clip_grad_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    parts.ema.update_parameters(parts.model)
    return numbers


def steps_of_pools(sampler: BlockSampler, factor: float, epoch: int) -> list[int]:
    """Steps on each pool of an epoch."""
    first = epoch * sampler.pools_per_epoch
    rows = [
        min(sampler.max_pool_rows, sampler.num_samples - n * sampler.max_pool_rows)
        for n in range(sampler.pools_per_epoch)
    ]
    return [echo_passes(factor, first + n) * -(-n_rows // sampler.batch_size) for n, n_rows in enumerate(rows)]


def train(parts: Parts, world: World) -> int:
    """Train to the end, or until a signal asks for a stop. Returns the exit code."""
    cfg, sizes, workload, sampler = parts.config, parts.sizes, parts.workload, parts.loader.order
    with Run(parts, world) as run, TensorBoard(run, world) as board, Monitor(world) as monitor:
        at = run.progress  # epoch, pool of the epoch, steps on it; zeros for a new run
        clock = Clock(world)
        steps: list[dict[str, Tensor]] = []  # their numbers, since the last point of the log
        while at.epoch < cfg.train.epochs and not run.is_asked_to_stop:
            for pool in clock.timed(parts.loader.pools(at.epoch, at.pool)):
                passes = echo_passes(cfg.data.echo, at.epoch * sampler.pools_per_epoch + at.pool)  # 2.5: 2, 3, 2, ...
                fresh = cfg.data.batch_size / passes  # rows of an echoed batch that count as fresh ones
                seed = make_seed(cfg.run.seed, at.epoch, at.pool, world.rank, 1)  # 1: apart from the seeds of steps
                batches = echo(pool.rows, sizes.batch_size, passes, seed)
                for batch in islice(batches, at.pool_steps, None):  # a resumed run goes on inside its pool
                    of_pools = steps_of_pools(sampler, cfg.data.echo, at.epoch)
                    epoch_step, n_steps = sum(of_pools[: at.pool]) + at.pool_steps, sum(of_pools)
                    share = (at.epoch * n_steps + epoch_step + 0.5) / (cfg.train.epochs * n_steps)  # up to mid-step
                    lr = learning_rate(share, cfg.optim)
                    rng = reseed(world.device, cfg.run.seed, at.epoch, epoch_step, world.rank)
                    rows = workload.transform(batch, rng)
                    steps.append(train_step(parts, rows, lr))
                    run.count()  # advances at.step and at.pool_steps; now and then asks all ranks for signals
                    clock.count(fresh, cfg.data.batch_size)
                    board.count(fresh)
                    is_epoch_end = pool.plan.is_last and at.pool_steps * sizes.batch_size == passes * len(pool.rows)
                    if len(steps) == cfg.log.every_steps or is_epoch_end or run.is_asked_to_stop:
                        numbers = mean_over_ranks(steps, world)  # in a pool, the host waits for the device only here
                        steps.clear()
                        if not isfinite(loss := numbers["train/loss"]):
                            raise UserError(f"the loss is {loss} at step {at.step}; lower optim.lr ({cfg.optim.lr})")
                        board.write(at.step, {**numbers, "train/lr": lr, **monitor.take()}, clock.take())
                    if run.is_asked_to_stop:
                        return run.finish()  # saves this very step
                run.end_pool()  # advances at.pool; saves if run.checkpoint_every_steps says so
            metrics = evaluate(parts.ema.module, workload, run.val_pools(), world, precision=parts.precision)
            if not run.is_asked_to_stop:
                run.end_epoch(metrics)  # advances at.epoch; saves the last checkpoint, and the best one
                board.end_epoch(f"{at.epoch}/{cfg.train.epochs}", at.step, metrics)
        return run.finish()


if __name__ == "__main__":
    with exit_with_message(), init_distributed(config.dist) as world:  # nccl between GPUs, gloo between CPUs
        parts = build(config, world)
        exit_code = 0 if config.run.check else train(parts, world)
    sys.exit(exit_code)
