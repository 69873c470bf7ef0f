"""Builds data, model and optimizer from config.yaml, and runs the training loop.

python train.py                                      one process: CPU or one GPU
torchrun --standalone --nproc-per-node=gpu train.py  every GPU of this machine
python train.py data.batch_size=512 train.epochs=3   any key of docs/config.md
"""

import sys

from fastgpu.process.config_loader import load_config
from fastgpu.process.launch import SharedError, exit_with_message

# config.yaml is read before torch, whose import takes seconds: a mistake in it is reported at once.
if __name__ == "__main__":
    with exit_with_message():
        config = load_config(sys.argv[1:])

import gc
from contextlib import closing
from math import cos, isfinite, pi
from typing import NamedTuple

import torch
from torch import Tensor, nn

import workloads
from fastgpu import feed, training
from fastgpu.process.config import Config, Optim
from fastgpu.process.seeds import reseed
from fastgpu.process.world import World, init_distributed
from fastgpu.rows import BlockSampler, Rows, Shard
from fastgpu.run import Run, Stateful, describe_model, identify_job, saved_canonical_ranks
from fastgpu.telemetry import Clock, Monitor, TensorBoard


class Training(NamedTuple):
    """All that the loop needs, as `build` makes it. diagnose.py measures these very objects."""

    config: Config  # with the value that was chosen in place of each `auto`
    asked: Config  # with `auto`, which a resumed run chooses again for its machine
    splits: feed.Splits
    loader: feed.Loader
    val_loaders: dict[str, feed.Loader]  # {group of the metrics: batches}: val, or val/<name> of several
    workload: workloads.Workload
    model: nn.Module
    ddp: nn.Module  # the model, wrapped in DistributedDataParallel if there is more than one rank
    optimizer: torch.optim.Optimizer
    precision: training.MixedPrecision
    ema: training.AveragedModel  # ema.module is validated, and saved for use

    def close(self) -> None:
        """End the threads and processes that read."""
        for loader in (self.loader, *self.val_loaders.values()):
            loader.close()


# -------------------------------------------------------------------------- data, model, optimizer
def build(cfg: Config, splits: feed.Splits, world: World) -> Training:
    # A resumed run keeps its canonical ranks, so that fewer ranks see the same global batches.
    saved_ranks = saved_canonical_ranks(cfg.run, world)

    # If a rank raises a UserError in this block, such as a missing file, all ranks raise it. So no
    # collective may be in it, and no DDP, which has one: the other ranks would wait for it.
    with world.raise_on_all_ranks():
        if splits.error:
            raise splits.error
        chosen = feed.resolve_auto(cfg, splits, world, saved_ranks)
        loader, val_loaders = build_loaders(chosen, splits, world)

        # Tensor cores prefer the NHWC memory format, so the weights of convolutions have it, too.
        workload = workloads.make(cfg, splits.train, splits.val)
        torch.manual_seed(cfg.run.seed)
        model = workload.model()
        training.move_model(model, world.device)
        optimizer = make_optimizer(model, cfg.optim)
        training.prepare_optimizer(model, optimizer)  # notes the rates that the schedule scales
        precision = training.mixed_precision(cfg.train.precision, world.device, optimizer)

    # From here on, the config has the value that was chosen in place of each `auto`.
    options = workload.options.model_dump()
    asked = cfg.resolved(model=options)
    cfg = chosen.resolved(model=options, train={"precision": precision.name})
    world.check_same(identify_job(cfg.flat(), splits, loader.fingerprint))

    # The average copies the model, so it comes before DDP. Only the module of the steps is compiled:
    # `model`, which has the same weights, is validated and saved uncompiled.
    ema = training.AveragedModel(model, cfg.train.ema)  # with a decay of 0, it is the model itself
    ddp = training.wrap_in_ddp(model, cfg.dist, world)
    if cfg.train.compile:
        ddp = training.compile_module(ddp)
    return Training(cfg, asked, splits, loader, val_loaders, workload, model, ddp, optimizer, precision, ema)


def build_loaders(cfg: Config, splits: feed.Splits, world: World) -> tuple[feed.Loader, dict[str, feed.Loader]]:
    """The batches of this rank, on its device: shuffled to train, in file order to validate."""
    # BlockSampler is a DistributedSampler that shuffles blocks of a file, then the samples of many
    # batches. Any number of ranks that divides `canonical_ranks` sees the same global batches.
    shard = Shard(world.rank, world.world_size, int(cfg.data.canonical_ranks))
    size, pool = cfg.data.batch_size // world.world_size, int(cfg.data.pool_batches)
    sampler = BlockSampler(splits.train, size, shard, pool, seed=cfg.run.seed)
    world.print_once(feed.describe(cfg, splits, sampler, world))

    # A PrefetchLoader reads ahead in threads or worker processes and copies to the device; a
    # ResidentLoader has all data there. Both echo: with data.echo=2, batches are trained on twice.
    # Your own: objects with fingerprint, steps_per_epoch, batches, close (see docs/code.md).
    memory = feed.ResidentRows((splits.train, *splits.val.values()), cfg, world.device)
    loader = feed.open_loader(splits.train, sampler, memory, cfg)

    # Several validation sets share the memory of one: smaller pools in file order hold the same batches.
    val_shard, val_pool = Shard(world.rank, world.world_size), max(1, pool // len(splits.val))
    val_loaders: dict[str, feed.Loader] = {}
    for tag, rows in splits.val.items():
        val_sampler = BlockSampler(rows, size, val_shard, val_pool, seed=None)
        val_loaders[tag] = feed.open_loader(rows, val_sampler, memory, cfg)
    return loader, val_loaders


def make_optimizer(model: nn.Module, optim: Optim) -> torch.optim.Optimizer:
    """All have fused kernels. To add one: a branch here, and its name in `Optim.name`."""
    weights = [p for p in model.parameters() if p.requires_grad]
    matrices = {"params": [p for p in weights if p.ndim >= 2], "weight_decay": optim.weight_decay}
    biases_and_norms = {"params": [p for p in weights if p.ndim < 2], "weight_decay": 0.0}
    groups = [matrices, biases_and_norms]
    lr, momentum = optim.lr, optim.momentum
    if optim.name == "adamw":
        return torch.optim.AdamW(groups, lr, betas=(momentum, 0.999), fused=True)  # beta1
    if optim.name == "sgd":
        return torch.optim.SGD(groups, lr, momentum, nesterov=momentum > 0, fused=True)
    return training.apex_optimizer(groups, optim)  # fused_adam or fused_lamb of NVIDIA Apex


# ---------------------------------------------------------------------------------------- one step
def schedule(share: float, optim: Optim) -> float:
    """A factor: linear warm-up, then a cosine or a line to 0, or 1. share: of the run, 0 to 1."""
    warmup = optim.warmup_share
    rise = min(1.0, share / warmup) if warmup else 1.0
    fall = min(1.0, max(0.0, share - warmup) / max(1e-9, 1 - warmup))
    shapes = {"cosine": 0.5 * (1 + cos(pi * fall)), "linear": 1 - fall, "constant": 1.0}
    return rise * shapes[optim.schedule]


def train_step(t: Training, batch: Rows, factor: float) -> dict[str, Tensor]:
    """Forward, backward, update. Nothing here waits. Returns what is logged: {tag: scalar}."""
    optim, optimizer, scaler = t.config.optim, t.optimizer, t.precision.scaler
    for group in optimizer.param_groups:
        group["lr"] = factor * group["initial_lr"]  # diagnose.py passes 0: its steps change nothing

    # Accumulation: each micro-batch adds its share of the gradients. DDP averages them over the
    # ranks in the backward pass of the last one only: DDP.no_sync() toggles this attribute, too.
    loss_sum = torch.zeros((), device=batch.device)
    for n, micro_batch in enumerate(training.cut_batch(batch, optim.accumulation_steps), 1):
        t.ddp.require_backward_grad_sync = n == optim.accumulation_steps  # type: ignore[assignment]
        with t.precision.autocast:
            loss = t.workload.loss(t.ddp, micro_batch) / optim.accumulation_steps
        scaler.scale(loss).backward()
        loss_sum += loss.detach()
    metrics = {"train/loss": loss_sum}

    # In fp16 the gradients are scaled, and clipping needs their true values. The scaler skips a
    # step whose gradients are not finite. In bf16 and fp32 it does nothing.
    scaler.unscale_(optimizer)
    if optim.clip_grad_norm:
        weights = t.model.parameters()
        metrics["train/grad_norm"] = nn.utils.clip_grad_norm_(weights, optim.clip_grad_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    t.ema.update_parameters(t.model)
    return metrics


# ---------------------------------------------------------------------------------------- the loop
def validate(t: Training, run: Run, board: TensorBoard, world: World) -> bool:
    """Validate the average of the weights, log, and save. False: a signal came before the end."""
    # Nothing of the training changes, so all ranks together may call this after any step.
    at, model, workload = run.progress, t.ema.module, t.workload
    metrics: dict[str, float] = {}
    for tag, loader in t.val_loaders.items():
        # Validations are counted over the run: if the numbers are consecutive, the loader reads ahead.
        batches = run.guard(loader.batches(at.validations))
        found = training.evaluate(model, workload, batches, world, precision=t.precision, should_stop=run.should_stop)
        if found is None:
            return False
        metrics |= {f"{tag}/{name}": value for name, value in found.items()}
    metrics |= run.save(metrics)  # the last checkpoint and, if the metric is the best so far, the best
    advice, epoch_steps = feed.bottleneck(t.loader), t.loader.steps_per_epoch(at.epoch)
    board.write_validation(at.epoch, at.step, metrics, advice, epoch_steps=epoch_steps)
    return True


def train(t: Training, world: World) -> int:
    """Train to the end, or until SIGTERM, SIGINT, SIGUSR2 or SIGHUP. Returns the exit code."""
    cfg, loader, workload, lr = t.config, t.loader, t.workload, t.config.optim.lr

    # What a checkpoint keeps, by name: anything with a state_dict, such as a second optimizer.
    state: dict[str, Stateful] = {"model": t.model, "optimizer": t.optimizer}
    state["scaler"] = t.precision.scaler
    if cfg.train.ema:
        state["ema"] = t.ema
    model_card = describe_model(cfg.flat(), t.splits, workload.card(), loader.fingerprint)

    run = Run(cfg.run, world, state, model_card, values=t.asked.model_dump(), best=workload.best)
    at = run.progress  # epoch, epoch_step, step: zeros, or of the checkpoint that Run has loaded
    clock = Clock(world, cfg.data.batch_size, cfg.data.echo)
    metrics: list[dict[str, Tensor]] = []  # of the steps since the last point of the log
    with (
        closing(t),
        run,
        TensorBoard(run.folder, cfg.flat(), world, step=at.step) as board,
        Monitor(world, {"use of buckets": feed.counters}) as monitor,
    ):
        # All objects so far live to the end: the garbage collector need not visit them again.
        gc.collect(1)  # young garbage only: a whole pass takes 0.15 s
        gc.freeze()
        # A signal has cut the validation of this step short, so a resumed run begins with it.
        stop = run.should_validate() and not validate(t, run, board, world)
        while not (stop or run.is_over()):
            n_steps = loader.steps_per_epoch(at.epoch)
            training.check_groups(t.model, state.values())  # a frozen part may train from now on
            # The batches come on the device. A resumed run begins with the step after its last one.
            # If the loader fails, `guard` saves the last step.
            batches = run.guard(loader.batches(at.epoch, start=at.epoch_step), n_steps)
            for batch in clock.timed(batches):
                done = run.share_done(n_steps)  # in mid-step
                factor = schedule(done, cfg.optim)

                # Each step has its own seed: a resumed run draws the same augmentation and dropout.
                rng = reseed(world.device, cfg.run.seed, at.epoch, at.epoch_step, world.rank)
                metrics.append(train_step(t, workload.transform(batch, rng), factor))
                at.advance(n_steps)  # the last step of an epoch leads to step 0 of the next one
                board.count(at.step, done)

                # All ranks get here after the same steps, and get the same answers: whether a signal
                # came to any rank. So all ranks do what follows, or none: if one rank skipped it, with
                # a `continue` of its own, the others would wait for it.
                stop = run.should_stop()
                validates, saves = run.should_validate(), run.should_save()

                # The host runs ahead of the device, and waits for it only here, for the metrics.
                # Saves and validations come after a point of the log, so no interval counts them.
                is_break = at.epoch_step == 0 or stop or validates or saves
                if is_break or len(metrics) == cfg.log.every_steps:
                    means = training.mean_over_ranks(metrics, world)
                    metrics.clear()
                    if not isfinite(loss := means["train/loss"]):
                        raise SharedError(f"loss is {loss} at step {at.step}; lower optim.lr={lr}")
                    means |= {"train/lr": lr * factor} | monitor.means()
                    board.write(at.step, means, clock.interval())

                if validates and not stop:
                    stop = not validate(t, run, board, world)
                elif saves and not stop:
                    board.write(at.step, run.save())
                if stop or run.is_over():
                    break
                if validates or saves:
                    clock.restart()
        if stop:
            run.save()
        return run.end()


# -------------------------------------------------------------------------------------------- main
if __name__ == "__main__":
    with exit_with_message():
        # HDF5 files (HDF5Dataset), or any torch Dataset (data.dataset). They are opened first: the
        # workers of a Dataset are forks of this process, and neither CUDA nor NCCL survives a fork.
        splits = feed.open_rows(config)  # `build` raises its error, where all ranks end together
        # The process group is nccl, or gloo on CPUs. On a GPU the kernels are chosen before NCCL
        # starts: cudnn.benchmark and TF32, or with run.deterministic the same bits in every run.
        with init_distributed(config.dist, deterministic=config.run.deterministic) as world:
            t = build(config, splits, world)
            exit_code = 0 if config.run.check else train(t, world)
    sys.exit(exit_code)
