"""diagnose.py on a project with a planted fault: what it shows, and that its advice brings the gain that it predicts.

Causes that only a GPU has are in test_planted.py.
"""

import json
import shutil
import sys
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytest

from support import PROJECT
from support.ranks import copy_project, printed_by, run_to_end

MAX_TRIES = 8
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
from workloads import minimal

class Workload(minimal.Workload):
    class Options(minimal.Workload.Options):
        operations: int = 0
        row_s: float = 0.0
        slow_rank: int = -1

    def transform(self, batch, rng):
        time.sleep(0.002 * self.options.operations)
        return batch

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


class Planted(NamedTuple):
    """A fault, and how its advice begins."""

    words: dict[str, object]
    cause: str
    change: str
    cure: dict[str, object] | None = None
    """What is done if the change is no setting."""
    ranks: int = 1


STEP = {"data.tier": "host", "model.row_s": 0.001}
EACH_ROW = {"model.operations": 16}
PLANTED = {
    "items that wait": Planted({}, "READ", "loader.num_workers=4"),
    "items that wait in line": Planted({"data.dataset": "planted:WaitsInLine"}, "READ", "data.echo="),
    "items that compute": Planted(
        {"data.dataset": "planted:Computes", "loader.num_workers": 1}, "DECODE", "loader.num_workers=2"
    ),
    "a transform of each row": Planted(STEP | EACH_ROW, "AUGMENT", "make `transform` lighter", {"model.operations": 1}),
    "a slow rank": Planted(
        STEP | {"model.slow_rank": 1}, "RANKS", "look at the machine of rank 1", {"model.slow_rank": -1}, ranks=2
    ),
    "many gradients": Planted(STEP | {"model.hidden_dim": 40_000}, "RANKS", "data.batch_size=32", ranks=2),
}


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A copy of the project with a Dataset and a workload that can be slow."""
    folder = copy_project(tmp_path_factory.mktemp("planted"))
    shutil.copyfile(PROJECT / "diagnose.py", folder / "diagnose.py")
    (folder / "planted.py").write_text(DATASETS)
    (folder / "workloads/planted.py").write_text(WORKLOAD)
    (folder / "config.yaml").write_text(CONFIG)
    return folder


def command_of(*words: str, ranks: int = 1) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    return [sys.executable, *launcher, "diagnose.py", "--seconds", "0.2", *words]


def diagnose(project: Path, words: dict[str, object], ranks: int = 1) -> dict[str, Any]:
    """What diagnose.py measures with these settings."""
    command = command_of("--json", *(f"{key}={value}" for key, value in words.items()), ranks=ranks)
    return json.loads(printed_by(command, project, OMP_NUM_THREADS="1"))


def rows_per_s(numbers: dict[str, Any]) -> float:
    return numbers["batch_size"] / median(numbers["loop"])


@pytest.mark.slow
def test_diagnose_table_and_profile(project):
    refused = run_to_end(command_of("data.batch_size=0"), project)
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
    assert not (project / "runs").exists()
    printed = printed_by(command_of("--trace", "3"), project, OMP_NUM_THREADS="1")
    assert "measuring: round 2 of at most 16" in printed
    for part in ("compute ", "supply ", "the training loop ", "feed ratio ", "READ: ", "loader.num_workers=4\n"):
        assert part in printed
    assert (project / "runs/trace.json").exists()


@pytest.mark.slow
def test_diagnose_two_ranks_as_json(project):
    numbers = diagnose(project, STEP, ranks=2)
    assert numbers["title"].startswith("2 x CPU over gloo, 16 rows per step")
    assert numbers["config"]["data.batch_size"] == 16
    assert len(numbers["ranks_compute"]) == 2
    assert numbers["verdict"]["cause"]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_gain_of_advice(project, name):
    planted = PLANTED[name]
    notes = []
    for _ in range(MAX_TRIES):
        slow = diagnose(project, planted.words, planted.ranks)
        verdict = slow["verdict"]
        note = f"{name}: {verdict['cause']}, {verdict['change']}, predicted {verdict['gain']:.2f} x"
        if verdict["cause"] == planted.cause and verdict["change"].startswith(planted.change):
            taken = planted.cure or dict([verdict["change"].split("=")])
            cured = diagnose(project, planted.words | taken, planted.ranks)
            gain = rows_per_s(cured) / rows_per_s(slow)
            note += f", measured {gain:.2f} x"
            print(note)
            if gain > 1.1 and gain == pytest.approx(verdict["gain"], rel=ROOM):
                return
        notes.append(note)
    raise AssertionError("\n".join(notes))
