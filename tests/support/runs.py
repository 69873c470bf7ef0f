"""Whole training runs in a folder, what they leave there, and parts of train.py without data."""

import gc
import json
import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
import train as script
from torch import nn
from train import Training, make_optimizer

from fastgpu.feed import open_rows
from fastgpu.process.config import Config, Optim, Precision
from fastgpu.process.config_loader import load_config
from fastgpu.process.launch import UserError
from fastgpu.process.world import World
from fastgpu.rows.order import BlockSampler
from fastgpu.storage.arrays import ArrayDataset
from fastgpu.training.average import AveragedModel
from fastgpu.training.step import mixed_precision, prepare_optimizer
from support.ranks import ALONE, kill_tree, printed_by, train_command, wait_until

MINIMAL = """
workload: minimal
run: {name: a}
data: {train: "rows.h5::/train", val: "rows.h5::/val", fields: {x: x, y: y}, batch_size: 32, pool_batches: 4}
train: {epochs: 3}
dist: {device: cpu}
log: {every_steps: 5}
"""


def write_minimal(folder: Path, n_rows: int = 700, n_val_rows: int = 100) -> None:
    """Write rows.h5 and config.yaml for the workload `minimal` to a folder.

    An epoch has 21 whole batches of 32 rows. The groups train and val of rows.h5 hold x, float32 (N, 6), and y (N,), a
    smooth function of x.
    """
    rng = np.random.default_rng(0)
    with h5py.File(folder / "rows.h5", "w") as file:
        for name, count in (("train", n_rows), ("val", n_val_rows)):
            x = rng.standard_normal((count, 6), np.float32)
            group = file.create_group(name)
            group.create_dataset("x", data=x, chunks=(20, 6))
            group["y"] = np.sin(x[:, 0]) + x[:, 1] * x[:, 2]
    (folder / "config.yaml").write_text(MINIMAL)


def train(*words: str, world: World = ALONE) -> int:
    """`python train.py` of the current folder, in this process. Returns the exit code."""
    try:
        return script.train(build(*words, world=world), world)
    finally:
        gc.unfreeze()  # the next test must not keep what this run has built


def build(*words: str, world: World = ALONE) -> script.Training:
    """What train.py with these words builds before it trains."""
    config = load_config(list(words))
    return script.build(config, open_rows(config), world)


def train_rank(world: World, *words: str) -> int | str:
    """One rank of train.py, for `in_world`. Returns the exit code, or the message of a UserError."""
    try:
        return train(*words, world=world)
    except UserError as error:
        return str(error)


def at_call(n_calls: int, function: Callable[..., Any], what: Callable[[], object]) -> Callable[..., Any]:
    """The function; something else happens before the call with this number."""
    calls = count(1)

    def call(*arguments: Any) -> Any:
        if next(calls) == n_calls:
            what()
        return function(*arguments)

    return call


def signalled(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def metrics_of(run: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl of a run."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def val_points(run: Path) -> list[dict[str, float]]:
    """Those of the validations of a run with the workload `minimal`."""
    return [point for point in metrics_of(run) if "val/mse" in point]


def step_of(checkpoint: Path) -> int:
    """The optimizer steps that were done when a checkpoint was saved."""
    step: int = json.loads((checkpoint / "state.json").read_text())["progress"]["step"]
    return step


def saved_steps(run: Path) -> list[int]:
    """The steps of the last checkpoints of a run, which may go on."""
    steps = []
    for path in run.glob("checkpoints/last-*"):
        with suppress(FileNotFoundError):  # it has just been removed
            steps.append(step_of(path))
    return sorted(steps)


def wait_for_step(run: Path, step: int, process: subprocess.Popen) -> None:
    """Wait until a run has saved this step or a later one."""
    wait_until(lambda: any(number >= step for number in saved_steps(run)), process)


def newest(run: Path, kind: str = "last") -> Path:
    return max(run.glob(f"checkpoints/{kind}-*"), key=lambda path: path.name)


def weights_of(run: Path, name: str = "model") -> dict[str, torch.Tensor]:
    """The model in the newest checkpoint of a run, or another part of it."""
    return torch.load(newest(run) / f"{name}.pt", weights_only=True)


def same_weights(run: Path, other: Path, name: str = "model") -> bool:
    """Whether the newest checkpoints of two runs hold the same model, bit for bit."""
    ours = weights_of(run, name)
    theirs = weights_of(other, name)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def same_after_a_kill(project: Path, saved: str, *words: str) -> bool:
    """Whether two ranks that are killed and resumed end with the weights of two that nobody disturbs.

    saved: pattern of checkpoints; the ranks are killed as soon as there is one.
    """
    printed_by(train_command(*words, "run.name=whole", ranks=2, root=project), project)
    command = train_command(*words, "run.name=killed", ranks=2, root=project)
    with subprocess.Popen(command, cwd=project, stdout=subprocess.DEVNULL) as process:
        wait_until(lambda: any((project / "runs/killed/checkpoints").glob(saved)), process)
        kill_tree(process)
    printed_by(train_command("run.resume=runs/killed", ranks=2, root=project), project)
    return same_weights(project / "runs/whole", project / "runs/killed")


# ---------------------------------------------------------------------------------------------- parts of a run

SHORT_BATCH = 8
SHORT_STEPS = 4
SHORT_CONFIG = Config.model_validate(
    {
        "workload": "minimal",
        "data": {"train": "a.h5", "val": "b.h5", "fields": {"x": "images"}, "tier": "disk"},
        "model": {"hidden_dim": 8},
        "train": {"epochs": 2, "precision": "fp32"},
    }
)
SHORT_SOURCE = ArrayDataset("made up", {"x": np.zeros((SHORT_BATCH, 100), np.uint8)})
SHORT_ORDER = BlockSampler(np.full(SHORT_STEPS, SHORT_BATCH, np.int32), SHORT_BATCH, seed=0)


def parts_of_step(
    workload: object, model: nn.Module, settings: Optim, precision: Precision = "fp32", *, ddp: nn.Module | None = None
) -> Training:
    """The parts that `train_step` needs. workload: its `loss` is used."""
    unused = dict.fromkeys(("asked", "splits", "loader", "val_loaders"))
    optimizer = make_optimizer(model, settings)
    prepare_optimizer(model, optimizer)
    return Training(
        **unused,
        config=SHORT_CONFIG.model_copy(update={"optim": settings}),
        workload=workload,
        model=model,
        ddp=ddp or model,
        optimizer=optimizer,
        precision=mixed_precision(precision, next(model.parameters()).device),
        ema=AveragedModel(model, 0.0),
    )
