"""The change that diagnose.py names is made, and the loop becomes as much faster as was predicted.

Real runs of the script, of a project with a planted fault. Causes that only a GPU has are in test_planted.py.
"""

import json
import shutil
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from harness import ROOT, copy_project, printed_by

MAX_TRIES = 5
ROOM = 0.4
"""How far the measured gain may be from the predicted one, as a share of it: the machine is not idle."""

DATASETS = """
import fcntl, time
import numpy as np
from torch.utils.data import Dataset

class Waits(Dataset):
    def __init__(self, path):
        self.row = np.zeros(64, np.float32), np.float32(0)

    def __len__(self):
        return 512

    def __getitem__(self, number):
        time.sleep(0.02)
        return self.row

class WaitsInLine(Waits):
    def __getitem__(self, number):
        with open(__file__) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            return super().__getitem__(number)

class Computes(Waits):
    def __getitem__(self, number):
        t0 = time.thread_time()
        while time.thread_time() - t0 < 0.01:
            pass
        return self.row
"""
WORKLOAD = """
import os, time
import torch
from fastgpu.rows import Rows
from workloads import minimal

class Workload(minimal.Workload):
    class Options(minimal.Workload.Options):
        transform: str = ""
        row_s: float = 0.0
        slow_rank: int = -1

    def transform(self, batch, rng):
        x = batch["x"]
        if self.options.transform == "each row":
            x = torch.stack([row * (1 + 0.1 * torch.rand((), generator=rng)) for row in x])
        if self.options.transform == "whole batch":
            x = x * (1 + 0.1 * torch.rand((len(x), 1), generator=rng))
        return Rows({**batch.columns, "x": x})

    def loss(self, model, batch):
        is_slow = int(os.environ.get("RANK", 0)) == self.options.slow_rank
        time.sleep(self.options.row_s * len(batch) * (2.5 if is_slow else 1))
        return super().loss(model, batch)
"""
CONFIG = """
workload: planted
data: {train: x, val: x, dataset: "planted:Waits", fields: {x: x, y: y}, batch_size: 16}
loader: {num_workers: 2}
optim: {name: sgd}
dist: {device: cpu}
"""
IN_MEMORY = ("data.tier=host",)
PLANTED: dict[str, tuple[tuple[str, ...], int, str, str, str]] = {
    # what is planted: (words, ranks, the cause, how the change begins, the words of a change that is no setting)
    "items that wait": ((), 1, "READ", "loader.num_workers=4", ""),
    "items that wait in line": (("data.dataset=planted:WaitsInLine",), 1, "READ", "data.echo=", ""),
    "items that compute": (
        ("data.dataset=planted:Computes", "loader.num_workers=1"),
        1,
        "DECODE",
        "loader.num_workers=2",
        "",
    ),
    "a transform of each row": (
        (*IN_MEMORY, "model.transform=each row"),
        1,
        "AUGMENT",
        "make `transform` lighter",
        "model.transform=whole batch",
    ),
    "many gradients": (
        (*IN_MEMORY, "model.hidden_dim=60000", "model.row_s=0.0005"),
        2,
        "RANKS",
        "data.batch_size=32",
        "",
    ),
    "a slow rank": (
        (*IN_MEMORY, "model.row_s=0.001", "model.slow_rank=1"),
        2,
        "RANKS",
        "look at the machine of rank 1",
        "model.slow_rank=-1",
    ),
}


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A copy of the project with a Dataset and a workload that can be slow."""
    folder = copy_project(tmp_path_factory.mktemp("planted"))
    shutil.copyfile(ROOT / "diagnose.py", folder / "diagnose.py")
    (folder / "planted.py").write_text(DATASETS)
    (folder / "workloads/planted.py").write_text(WORKLOAD)
    (folder / "config.yaml").write_text(CONFIG)
    return folder


def diagnose(project: Path, *words: str, ranks: int) -> dict[str, Any]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launcher, "diagnose.py", "--json", "--seconds", "0.2", *words]
    return json.loads(printed_by(command, project, OMP_NUM_THREADS="1"))


def rows_per_s(numbers: dict[str, Any]) -> float:
    return numbers["batch_size"] / median(numbers["loop"])


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("planted", PLANTED)
def test_gain_of_advice_that_is_taken(project, planted):
    words, ranks, cause, change, cure = PLANTED[planted]
    notes = []
    for _ in range(MAX_TRIES):
        slow = diagnose(project, *words, ranks=ranks)
        verdict = slow["verdict"]
        is_named = verdict["cause"] == cause and verdict["change"].startswith(change)
        taken = cure or verdict["change"] if is_named else ""
        note = f"{verdict['cause']}: {verdict['change']}, predicted {verdict['gain']:.2f} x"
        if is_named:
            cured = diagnose(project, *words, taken, ranks=ranks)
            gain = rows_per_s(cured) / rows_per_s(slow)
            print(f"{planted}: {note}, measured {gain:.2f} x")
            if gain == pytest.approx(verdict["gain"], rel=ROOM) and gain > 1.1:
                return
            note += f", measured {gain:.2f} x"
        notes.append(note)
    raise AssertionError(notes)
