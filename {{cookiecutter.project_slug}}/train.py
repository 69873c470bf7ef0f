"""Train on rows that are on the device before the step asks for them.

python train.py                                             one process: a CPU or one GPU
torchrun --standalone --nproc-per-node=gpu train.py         on a machine with GPUs: all of them
python train.py run.check=true data.batch_size=512          build data and model, and stop: train and write nothing
python train.py data.batch_size=512 train.epochs=3          any key of config.yaml; --help lists them
"""

import sys

import workloads
from fastgpu.process.config_loader import load_config, read_options
from fastgpu.process.launch import exit_with_message, read_launch
from fastgpu.process.signals import end_with_launcher
from fastgpu.run.folder import refuse_taken

if __name__ == "__main__":  # before torch, whose import takes seconds: a mistake in the config is reported at once
    launch = read_launch()
    end_with_launcher(launch)
    with exit_with_message(launch):
        config = load_config(sys.argv[1:], workloads.find_options)
        refuse_taken(config.run)

from collections.abc import Iterable
from contextlib import closing
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fastgpu.feed.echo import remaining_batches
from fastgpu.feed.sizes import Sizes, choose_sizes
from fastgpu.feed.sources import open_splits
from fastgpu.feed.tiers import Feed, open_loaders
from fastgpu.process.config import Config
from fastgpu.process.world import World, join
from fastgpu.rows.contract import Dataset, Pool
from fastgpu.rows.order import BlockSampler, Shard, echo_passes
from fastgpu.rows.rows import Rows
from fastgpu.run.checkpoint import Stateful
from fastgpu.run.model_files import describe_model
from fastgpu.run.record import describe_feed, identify_job
from fastgpu.run.run import Run
from fastgpu.training.evaluate import AveragedModel, evaluate
from fastgpu.training.parallel import keep_state, make_seed, reseed, share_gradients, unused_gpus_hint
from fastgpu.training.step import (
    MixedPrecision,
    OptimizerState,
    lr_factor,
    make_optimizer,
    micro_batches,
    mixed_precision,
    prepare_to_skip,
    to_device,
)
from workloads import Workload


class Parts(NamedTuple):
    """What the loop is made of. diagnose.py measures these very objects."""

    config: Config  # `auto` is replaced by what was chosen: precision, tier, sizes, readers
    sizes: Sizes
    train_rows: Dataset
    val_rows: Dataset
    loader: Feed  # PrefetchLoader: pools are read ahead. ResidentLoader: all rows stay on the device
    val_loader: Feed
    workload: Workload
    model: nn.Module
    ddp: nn.Module  # the same model; it averages the gradients over the ranks
    optimizer: torch.optim.Optimizer
    precision: MixedPrecision
    ema: AveragedModel | None = None  # its weights, averaged over the steps

    @property
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
        sampler = BlockSampler(
            train_rows, sizes.batch_size, shard=shard, pool_batches=sizes.pool_batches, seed=cfg.run.seed
        )
        val_sampler = BlockSampler(  # in the order of the file, to the last row
            val_rows,
            sizes.batch_size,
            shard=Shard(world.rank, world.world_size),
            pool_batches=sizes.pool_batches,
            seed=None,
            drop_last=False,
        )
        sampler.n_epochs = val_sampler.n_epochs = cfg.train.epochs  # no rows are read ahead for an epoch after the last
        samplers = sampler, val_sampler
        loader, val_loader = open_loaders((train_rows, val_rows), samplers, sizes, world.device, loader=cfg.loader)
    precision = mixed_precision(cfg.train.precision, world.device)
    for key, rows in (("data.train", train_rows), ("data.val", val_rows)):
        world.check_same({f"{key}: {name}": value for name, value in rows.identity.items()})
    world.check_same(
        identify_job(cfg.flat()) | {"the order of rows": sampler.identity, "train.precision": precision.name}
    )

    torch.manual_seed(cfg.run.seed)
    model = to_device(workload.model(), world.device)
    ema = AveragedModel(model, cfg.train.ema) if cfg.train.ema else None
    with world.together():  # one rank may lack a package
        optimizer = make_optimizer(model, cfg.optim)
    prepare_to_skip(optimizer, precision)
    has_ragged = any(field.is_ragged for field in train_rows.fields.values())
    ddp = share_gradients(model, cfg.dist, world, static_graph=cfg.optim.accumulation_steps == 1, has_ragged=has_ragged)
    if cfg.train.compile:
        ddp.compile()
    resolved = cfg.resolved(
        data=sizes.data_values(),
        loader=sizes.loader_values(),
        model=options.model_dump(),
        train={"precision": precision.name},
    )
    return Parts(
        resolved,
        sizes,
        train_rows,
        val_rows,
        loader,
        val_loader,
        workload,
        model,
        ddp,
        optimizer,
        precision,
        ema,
    )


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
    if parts.ema:
        parts.ema.update_parameters(parts.model)
    optimizer.zero_grad()
    return torch.stack(losses).sum()


def rehearse(parts: Parts, batch: Rows, world: World) -> None:
    """Run two backward passes that change nothing, by which DDP chooses the places of the gradients in its buckets.

    A place decides in which order the ranks' gradients are summed. Without the rehearsal, a resumed run would round its
    first steps otherwise than a run that goes on.
    """
    *_, (part, _) = micro_batches(batch, parts.config.optim.accumulation_steps, parts.ddp)
    with keep_state(parts.model, world):
        for _ in range(2):
            with parts.precision.autocast:
                loss = parts.workload.loss(parts.ddp, part)
            loss.backward()
            parts.optimizer.zero_grad()


def validate(parts: Parts, pools: Iterable[Pool], world: World) -> dict[str, float]:
    """{"val/<metric>": mean over the validation rows}."""
    return evaluate(
        parts.model_to_use,
        parts.workload,
        pools,
        batch_size=parts.sizes.batch_size,
        autocast=parts.precision.autocast,
        world=world,
    )


def check(cfg: Config, world: World) -> int:
    """Build all that training needs, and stop. Returns the exit code."""
    parts = build(cfg, world)
    with closing(parts.loader), closing(parts.val_loader):
        world.print_once(f"checked on {world}: {describe_feed(parts.train_rows, parts.sizes, parts.loader.order)}")
    return 0


def train(cfg: Config, world: World) -> int:
    """Train to the end, or until a signal asks for a stop. Returns the exit code."""
    parts = build(cfg, world)
    loader, workload = parts.loader, parts.workload
    sources = parts.train_rows, parts.val_rows
    epoch_rows = loader.order.total_size
    planned_rows = cfg.train.epochs * epoch_rows
    config = parts.config.flat()
    card = workload.card()
    description = describe_model(config, sources, card, workload.best)
    with (
        closing(loader),
        closing(parts.val_loader),
        closing(Run(cfg.run, parts.state, loader.order, world, config=config, description=description)) as run,
    ):
        at = run.progress  # epoch, pool of the epoch, steps on it; zeros for a new run
        world.print_once(f"{run.folder}: {world}, {parts.precision.name}, at step {at.step}")
        world.print_once(describe_feed(parts.train_rows, parts.sizes, loader.order))
        world.print_once(workload.summary)
        run.start(card)

        batch_size = parts.sizes.batch_size
        is_rehearsed = world.world_size <= 2  # two summands have one order
        while at.epoch < cfg.train.epochs:
            for pool in run.clock.timed(loader.pools(at.epoch, at.pool)):
                place = (cfg.run.seed, at.epoch, pool.plan.number)
                passes = echo_passes(cfg.data.echo, at.epoch * loader.order.pools_per_epoch + pool.plan.number)
                fresh_rows = float(at.epoch * epoch_rows + loader.order.rows_before(at.pool))
                step_rows = cfg.data.batch_size / passes  # an echoed batch counts as a part of a fresh one
                for _ in range(at.pool_steps):  # trained on before the run was resumed
                    fresh_rows += step_rows
                seed = make_seed(world, *place)
                for number, batch in remaining_batches(pool, batch_size, passes, seed, n_done=at.pool_steps):
                    rng = reseed(world, *place, number)  # a resumed run draws the same numbers
                    share = (fresh_rows + step_rows / 2) / planned_rows
                    lr = cfg.optim.lr * lr_factor(share, cfg.optim.warmup_share)
                    rows = workload.transform(batch, rng)
                    if not is_rehearsed:
                        rehearse(parts, rows, world)
                        is_rehearsed = True
                    loss = train_step(parts, rows, lr)
                    fresh_rows += step_rows
                    run.count(loss, step_rows, cfg.data.batch_size)
                    if run.clock.steps == cfg.log.every_steps:
                        run.report(fresh_rows, lr)  # inside a pool, the host waits for the device only here
                    if run.is_asked_to_stop(parts.model_to_use):
                        run.report(fresh_rows, lr)
                        return run.stop()
                at.pool = pool.plan.number + 1
                at.pool_steps = 0
                run.save_if_due(parts.model_to_use)
            if run.clock.steps:  # none have been made if the run was resumed at the end of an epoch
                run.report(fresh_rows, lr)

            metrics = validate(parts, run.until_asked_to_stop(parts.val_loader.pools(at.epoch)), world)
            if run.is_asked_to_stop(parts.model_to_use):
                return run.stop()
            run.end_epoch(parts.model_to_use, metrics)
        run.finish()
    return 0


if __name__ == "__main__":
    with exit_with_message(launch), join(launch, config.dist) as world:
        world.print_once(unused_gpus_hint(world, config.dist, " ".join(sys.argv)))
        exit_code = check(config, world) if config.run.check else train(config, world)
    sys.exit(exit_code)
