"""Parts of train.py without data: of a run of a few steps, and of a single step."""

from pathlib import Path
from typing import Any

import numpy as np
from harness import ALONE
from torch import nn
from train import Training, make_optimizer

from fastgpu.feed import Data, Sizes
from fastgpu.process.config import Config, Optim, Precision
from fastgpu.process.world import World
from fastgpu.rows.order import BlockSampler
from fastgpu.run.record import describe_model
from fastgpu.run.run import Run
from fastgpu.storage.arrays import ArrayDataset
from fastgpu.training.average import AveragedModel
from fastgpu.training.step import mixed_precision, note_groups

BATCH_SIZE = 8
STEPS_PER_EPOCH = 4
CONFIG = Config.model_validate(
    {
        "workload": "minimal",
        "data": {"train": "a.h5", "val": "b.h5", "fields": {"x": "images"}, "tier": "disk"},
        "model": {"hidden_dim": 8},
        "train": {"epochs": 2, "precision": "fp32"},
    }
)
SOURCE = ArrayDataset("made up", {"x": np.zeros((BATCH_SIZE, 100), np.uint8)})
SIZES = Sizes(BATCH_SIZE, 1, 1, "disk", 1)
ORDER = BlockSampler(np.full(STEPS_PER_EPOCH, BATCH_SIZE, np.int32), BATCH_SIZE, seed=0)


def started_run(
    folder: Path,
    model: nn.Module | None = None,
    *,
    best: tuple[str, str] = ("score", "higher"),
    state: dict[str, Any] | None = None,
    splits: tuple[ArrayDataset, ArrayDataset] = (SOURCE, SOURCE),
    world: World = ALONE,
    **settings: Any,
) -> Run:
    """A run of this process. settings: of section `run`. state: more than the model."""
    cfg = CONFIG.resolved(run={"folder": str(folder), "name": "a", **settings})
    card = describe_model(cfg.flat(), Data(*splits, SIZES), {"classes": ["a", "b"]}, ORDER.fingerprint)
    state = {"model": model or nn.Linear(2, 2), **(state or {})}
    return Run(cfg.run, world, state, card, values=cfg.model_dump(), best=best)


def train_epoch(run: Run, *, loss: float = 0.5, score: float = 1.0, save_every: int = 0) -> None:
    """Four steps, and the end of an epoch."""
    at = run.progress
    for _ in range(STEPS_PER_EPOCH):
        at.step += 1
        at.epoch_step += 1
        run.should_stop()
        if save_every and at.step % save_every == 0:
            run.save()
    at.epoch += 1
    at.epoch_step = 0
    run.save({"val/score": score, "val/loss": loss})


def parts_of_step(
    workload: object, model: nn.Module, settings: Optim, precision: Precision = "fp32", *, ddp: nn.Module | None = None
) -> Training:
    """The parts that `train_step` needs. workload: its `loss` is used."""
    unused = dict.fromkeys(("data", "loader", "val_loader"))
    optimizer = make_optimizer(model, settings)
    note_groups(model, optimizer)
    return Training(
        **unused,
        config=CONFIG.model_copy(update={"optim": settings}),
        workload=workload,
        model=model,
        ddp=ddp or model,
        optimizer=optimizer,
        precision=mixed_precision(precision, next(model.parameters()).device),
        ema=AveragedModel(model, 0.0),
    )
