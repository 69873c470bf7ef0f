"""diagnose.py as a program: its table, its profile and its numbers as JSON, which test_planted.py proves right."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from support import PROJECT
from support.ranks import copy_project, printed_by, run_to_end

DATASET = """
import time
import numpy as np
from torch.utils.data import Dataset

class Waits(Dataset):
    def __init__(self, path):
        self.row = np.zeros(64, np.float32), np.float32(0)

    def __len__(self):
        return 512

    def __getitem__(self, number):
        time.sleep(0.01)
        return self.row
"""
CONFIG = """
workload: minimal
data: {train: x, val: x, dataset: "waits:Waits", fields: {x: x, y: y}, batch_size: 16}
loader: {num_workers: 2}
dist: {device: cpu}
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A copy of the project with a Dataset whose items wait."""
    folder = copy_project(tmp_path_factory.mktemp("slow"))
    shutil.copyfile(PROJECT / "diagnose.py", folder / "diagnose.py")
    (folder / "waits.py").write_text(DATASET)
    (folder / "config.yaml").write_text(CONFIG)
    return folder


def command_of(*words: str, ranks: int = 1) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    return [sys.executable, *launcher, "diagnose.py", "--seconds", "0.2", *words]


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
    numbers = json.loads(printed_by(command_of("--json", ranks=2), project, OMP_NUM_THREADS="1"))
    assert numbers["title"].startswith("2 x CPU over gloo, 16 rows per step")
    assert numbers["config"]["data.batch_size"] == 16
    assert len(numbers["ranks_compute"]) == 2
    assert numbers["verdict"]["cause"]
