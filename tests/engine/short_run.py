"""Parts of train.py without data: of a run of a few steps, and of a single step."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from harness import ALONE
from torch import nn
from train import Parts, make_optimizer

from fastgpu.process.config import Config, Optim, Precision
from fastgpu.rows.order import BlockSampler
from fastgpu.run.run import Run
from fastgpu.storage.arrays import ArrayDataset
from fastgpu.training.average import AveragedModel
from fastgpu.training.step import mixed_precision

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
ORDER = BlockSampler(np.full(STEPS_PER_EPOCH, BATCH_SIZE, np.int32), BATCH_SIZE, seed=0)
LOADER = SimpleNamespace(order=ORDER, close=lambda: None)
"""A loader without rows."""


def parts_of(
    folder: Path,
    model: nn.Module | None = None,
    *,
    name: str = "a",
    best: tuple[str, str] = ("score", "higher"),
    **settings: Any,
) -> Any:
    """What a run asks of the `Parts` of train.py. settings: of section `run`."""
    model = model or nn.Linear(2, 2)
    return SimpleNamespace(
        _asdict=lambda: {"model": model, "ddp": model},
        config=CONFIG.resolved(run={"folder": str(folder), "name": name, **settings}),
        train_rows=SOURCE,
        val_rows=SOURCE,
        loader=LOADER,
        val_loader=LOADER,
        workload=SimpleNamespace(card=lambda: {"classes": ["a", "b"]}, best=best),
        precision=SimpleNamespace(name="fp32", scaler=torch.amp.GradScaler("cpu", enabled=False)),
    )


def started_run(folder: Path, **options: Any) -> Run:
    """A run of this process. options: see `parts_of`."""
    return Run(parts_of(folder, **options), ALONE)


def train_epoch(run: Run, *, loss: float = 0.5, score: float = 1.0) -> None:
    """Four steps, one for each pool, and the end of an epoch."""
    for _ in range(STEPS_PER_EPOCH):
        run.count()
        run.end_pool()
    run.end_epoch({"val/score": score, "val/loss": loss})


def parts_of_step(
    workload: object, model: nn.Module, settings: Optim, precision: Precision = "fp32", *, ddp: nn.Module | None = None
) -> Parts:
    """The parts that `train_step` needs. workload: its `loss` is used."""
    unused = dict.fromkeys(("sizes", "train_rows", "val_rows", "loader", "val_loader"))
    return Parts(
        **unused,
        config=CONFIG.model_copy(update={"optim": settings}),
        workload=workload,
        model=model,
        ddp=ddp or model,
        optimizer=make_optimizer(model, settings),
        precision=mixed_precision(precision, next(model.parameters()).device),
        ema=AveragedModel(model, 0.0),
    )
