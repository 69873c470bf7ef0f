"""A run of a few steps in this process, without data: the loop of train.py as `Run` sees it."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fastgpu.process.config import Config
from fastgpu.process.config import Run as RunSettings
from fastgpu.process.world import World
from fastgpu.rows.order import BlockSampler
from fastgpu.run.model_files import describe_model
from fastgpu.run.run import Run
from fastgpu.storage.arrays import ArrayDataset

BATCH_SIZE = 8
STEPS_PER_EPOCH = 4
WORLD = World(0, 1, 1, torch.device("cpu"))
CARD = {"classes": ["a", "b"]}
CONFIG = Config.model_validate(
    {
        "workload": "minimal",
        "data": {"train": "a.h5", "val": "b.h5", "fields": {"x": "images"}, "tier": "disk"},
        "model": {"hidden_dim": 8},
        "train": {"epochs": 2, "precision": "fp32"},
    }
).flat()
"""{dotted key: value}"""
SOURCE = ArrayDataset("made up", {"x": np.zeros((BATCH_SIZE, 100), np.uint8)})
DESCRIPTION = describe_model(CONFIG, (SOURCE, SOURCE), CARD, ("score", "higher"))


@contextmanager
def started_run(
    folder: Path,
    model: nn.Module,
    *,
    name: str = "a",
    config: dict[str, Any] | None = None,
    best: tuple[str, str] = ("score", "higher"),
    **settings: Any,
) -> Iterator[Run]:
    """A run that has been started. settings: of section `run`."""
    description = {**DESCRIPTION, "best": best}
    order = BlockSampler(np.full(STEPS_PER_EPOCH, BATCH_SIZE, np.int32), BATCH_SIZE, seed=0)
    run_settings = RunSettings(folder=str(folder), name=name, **settings)
    config = CONFIG | (config or {})
    with closing(Run(run_settings, {"model": model}, order, WORLD, config=config, description=description)) as run:
        run.start(CARD)
        yield run


def train_epoch(run: Run, model: nn.Module, *, loss: float = 0.5, score: float = 1.0) -> None:
    """Four steps with a report after each, and the end of an epoch."""
    for step in range(1, STEPS_PER_EPOCH + 1):
        run.count(torch.tensor(loss), BATCH_SIZE, BATCH_SIZE)
        run.progress.pool = step
        run.report(step * BATCH_SIZE, lr=0.1)
        run.save_if_due(model)
    run.end_epoch(model, {"val/score": score, "val/loss": loss})
