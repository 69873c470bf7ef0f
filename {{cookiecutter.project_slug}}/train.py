"""Train on rows that are on the device before the step asks for them.

python train.py                                          one process: a CPU or one GPU
torchrun --standalone --nproc-per-node=gpu train.py      every GPU of this machine
python train.py data.batch_size=512 train.epochs=3       any key of config.yaml; docs/config.md explains them
"""

import sys

from fastgpu.process.config_loader import load_config
from fastgpu.process.launch import UserError, exit_with_message

# config.yaml is read before torch, whose import takes seconds: a mistake in it is reported at once.
if __name__ == "__main__":
    with exit_with_message():
        config = load_config(sys.argv[1:])

from contextlib import closing
from math import cos, isfinite, pi
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import workloads
from fastgpu.feed import Loader, Sizes, choose_sizes, open_loaders, open_splits
from fastgpu.process.config import Config, Optim
from fastgpu.process.seeds import reseed
from fastgpu.process.world import World, init_distributed
from fastgpu.rows import BlockSampler, Dataset, Rows, Shard
from fastgpu.run import Run, describe_feed, describe_model, identify_job
from fastgpu.telemetry import Clock, Monitor, TensorBoard
from fastgpu.training import AveragedModel, apex_optimizer, evaluate, mean_over_ranks, share_gradients
from fastgpu.training.step import MixedPrecision, mixed_precision, to_device


class Training(NamedTuple):
    """What `build` makes: all that the loop needs. diagnose.py measures these very objects."""

    config: Config  # with the value that was chosen in place of each `auto`
    sizes: Sizes
    train_rows: Dataset
    val_rows: Dataset
    loader: Loader
    val_loader: Loader
    workload: workloads.Workload
    model: nn.Module
    ddp: nn.Module
    optimizer: torch.optim.Optimizer
    precision: MixedPrecision
    ema: AveragedModel


def build(cfg: Config, splits: tuple[Dataset, Dataset], world: World) -> Training:
    # A UserError of one rank in this block, such as a missing file, ends every rank with its message.
    with world.together():
        train_rows, val_rows = splits
        workload = workloads.make(cfg, train_rows, val_rows)
        # `sizes` has a number for each `auto`.
        sizes = choose_sizes(cfg, train_rows, val_rows, world)

        # Order: BlockSampler is a DistributedSampler that shuffles blocks of the files, and rows within a pool of them.
        # Validation has no seed: it is not shuffled.
        batch_size, pool_batches = sizes.batch_size, sizes.pool_batches
        shard = Shard(world.rank, world.world_size, sizes.canonical_ranks)
        val_shard = Shard(world.rank, world.world_size)
        sampler = BlockSampler(train_rows, batch_size, shard, pool_batches, seed=cfg.run.seed)
        val_sampler = BlockSampler(val_rows, batch_size, val_shard, pool_batches, seed=None)

        # Loading: a PrefetchLoader reads ahead in threads or worker processes; a ResidentLoader has all rows on the
        # device. Both echo: data.echo trains on what was read several times. To train from another loader, replace
        # these two by objects with the four members of `Loader`.
        loader, val_loader = open_loaders(
            (train_rows, val_rows), (sampler, val_sampler), sizes, world.device, loader=cfg.loader
        )

        torch.manual_seed(cfg.run.seed)
        model = to_device(workload.model(), world.device)
        optimizer = make_optimizer(model, cfg.optim)
        precision = mixed_precision(cfg.train.precision, world.device, optimizer)

    cfg = cfg.resolved(**sizes.chosen, model=workload.options.model_dump(), train={"precision": precision.name})
    world.check_same(identify_job(cfg.flat(), (train_rows, val_rows), loader.fingerprint))
    world.print_once(describe_feed(train_rows, sizes, sampler))

    # The average copies the model, so it comes before DDP; what is compiled is the model with DDP around it.
    ema = AveragedModel(model, cfg.train.ema)  # a decay of 0: the model itself
    ddp = share_gradients(model, cfg.dist, world, train_rows)  # DistributedDataParallel if there are several ranks
    if cfg.train.compile:
        ddp.compile()
    return Training(
        config=cfg,
        sizes=sizes,
        train_rows=train_rows,
        val_rows=val_rows,
        loader=loader,
        val_loader=val_loader,
        workload=workload,
        model=model,
        ddp=ddp,
        optimizer=optimizer,
        precision=precision,
        ema=ema,
    )


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
    """A linear rise, then a cosine or a line to 0, or the peak. share: the part of the run that is done."""
    rise = min(1.0, share / optim.warmup_share) if optim.warmup_share else 1.0
    fall = min(1.0, max(0.0, share - optim.warmup_share) / max(1e-9, 1 - optim.warmup_share))
    return optim.lr * rise * {"cosine": 0.5 * (1 + cos(pi * fall)), "linear": 1 - fall, "constant": 1.0}[optim.schedule]


def train_step(t: Training, batch: Rows, lr: float) -> dict[str, Tensor]:
    """Forward, backward, update. Nothing here waits. Returns what each step logs: {tag: scalar on the device}."""
    optim, optimizer, scaler = t.config.optim, t.optimizer, t.precision.scaler
    for group in optimizer.param_groups:
        group["lr"] = lr  # 0 leaves the weights as they are: diagnose.py times such steps

    # Accumulation: each micro-batch adds its share of the gradients. Only the last one averages them over the ranks, in
    # its backward pass; DDP.no_sync() sets this attribute, too.
    loss_sum = torch.zeros((), device=batch.device)
    for n, micro_batch in enumerate(batch.batches(len(batch) // optim.accumulation_steps), 1):
        t.ddp.require_backward_grad_sync = n == optim.accumulation_steps  # type: ignore[assignment]
        with t.precision.autocast:
            loss = t.workload.loss(t.ddp, micro_batch) / optim.accumulation_steps
        scaler.scale(loss).backward()
        loss_sum += loss.detach()
    metrics = {"train/loss": loss_sum}

    # In fp16 the gradients are scaled, and have to be unscaled before they are clipped. A step whose gradients are not
    # finite is left out by the scaler. In bf16 and fp32, it does nothing.
    scaler.unscale_(optimizer)
    if optim.clip_grad_norm:
        metrics["train/grad_norm"] = nn.utils.clip_grad_norm_(t.model.parameters(), optim.clip_grad_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    t.ema.update_parameters(t.model)
    return metrics


def train(t: Training, world: World) -> int:
    """Train to the end, or until a signal asks for a stop. Returns the exit code."""
    cfg, loader, val_loader, workload = t.config, t.loader, t.val_loader, t.workload

    # What a checkpoint keeps, by name: whatever has a state_dict, such as a second optimizer.
    state: dict[str, Any] = {"model": t.model, "optimizer": t.optimizer, "scaler": t.precision.scaler}
    if cfg.train.ema:
        state["ema"] = t.ema
    card = describe_model(cfg.flat(), t.train_rows, t.val_rows, workload.card(), fingerprint=loader.fingerprint)

    with (
        closing(loader),
        closing(val_loader),
        Run(cfg, world, state, card, best=workload.best) as run,
        TensorBoard(run.folder, cfg.flat(), world, at=run.progress, steps_per_epoch=loader.steps_per_epoch) as board,
        Monitor(world) as monitor,
    ):
        at = run.progress  # epoch, epoch_step and step: zeros, or where the checkpoint was saved
        clock = Clock(world, cfg.data.batch_size, cfg.data.echo)
        metrics: list[dict[str, Tensor]] = []  # of the steps since the last point of the log
        while at.epoch < cfg.train.epochs:
            n_steps = loader.steps_per_epoch(at.epoch)
            for batch in clock.timed(loader.batches(at.epoch, start=at.epoch_step)):
                # The learning rate follows the part of the run that is done by the middle of this step.
                lr = learning_rate((at.epoch * n_steps + at.epoch_step + 0.5) / (cfg.train.epochs * n_steps), cfg.optim)

                # Every step is seeded anew, so a resumed run draws the same augmentation and dropout.
                rng = reseed(world.device, cfg.run.seed, at.epoch, at.epoch_step, world.rank)
                metrics.append(train_step(t, workload.transform(batch, rng), lr))
                at.step += 1
                at.epoch_step += 1
                board.count()
                stop = run.should_stop()  # now and then asks all ranks whether a signal came

                # The host runs ahead of the device, and waits for it only here, to read the metrics.
                if len(metrics) == cfg.log.every_steps or at.epoch_step == n_steps or stop:
                    means = mean_over_ranks(metrics, world)
                    metrics.clear()
                    if not isfinite(loss := means["train/loss"]):
                        raise UserError(f"the loss is {loss} at step {at.step}; lower optim.lr ({cfg.optim.lr})")
                    board.write(at.step, {**means, "train/lr": lr, **monitor.take()}, clock.take())

                if stop:
                    return run.finish()  # saves this step
                if cfg.run.checkpoint_every_steps and at.step % cfg.run.checkpoint_every_steps == 0:
                    run.save()

            # Validation. If a signal ends it, the run is resumed with it.
            val_batches = val_loader.batches(at.epoch)
            val_metrics = evaluate(
                t.ema.module, workload, val_batches, world, precision=t.precision, should_stop=run.should_stop
            )
            if val_metrics is None:
                return run.finish()
            at.epoch += 1
            at.epoch_step = 0
            run.save(val_metrics)  # the last checkpoint, and the best one
            board.end_epoch(f"{at.epoch}/{cfg.train.epochs}", at.step, val_metrics)
        return run.finish()


if __name__ == "__main__":
    with exit_with_message():
        # Data: HDF5 files (HDF5Dataset), or any torch Dataset (data.dataset). It is opened first, because the worker
        # processes of a Dataset are forks of this process, and neither CUDA nor NCCL survives a fork.
        opened = open_splits(config.data, config.loader, config.run.seed)
        with init_distributed(config.dist) as world:  # nccl between GPUs, gloo between CPUs
            training = build(config, opened, world)
            exit_code = 0 if config.run.check else train(training, world)
    sys.exit(exit_code)
