"""The command, with real files and processes. What it concludes is tested in test_planted.py and test_verdict.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support import PROJECT
from support.ranks import run_to_end


def diagnose(folder: Path, *arguments: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launcher, str(PROJECT / "diagnose.py"), "--seconds", "0.05", *arguments]
    return run_to_end(command, folder, OMP_NUM_THREADS="1")


@pytest.mark.slow
def test_diagnose_two_ranks_as_json(folder):
    refused = diagnose(folder, "data.train=none.h5")
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
    done = diagnose(folder, "--json", ranks=2)
    assert done.returncode == 0, done.stderr
    numbers = json.loads(done.stdout)
    assert numbers["title"].startswith("2 x CPU over gloo, 32 rows per step")
    assert numbers["config"]["data.batch_size"] == 32
    assert len(numbers["ranks_compute"]) == 2
    assert numbers["verdict"]["cause"]


SLOW_DATASET = """
import time
import numpy as np
from torch.utils.data import Dataset

class Slow(Dataset):
    def __init__(self, path):
        pass

    def __len__(self):
        return 512

    def __getitem__(self, row):
        time.sleep(0.02)
        return np.zeros(8, np.float32), np.float32(0)
"""


@pytest.mark.slow
def test_diagnose_table_of_a_slow_dataset(folder):
    """Its workers wait, so more of them are the advice."""
    (folder / "slow.py").write_text(SLOW_DATASET)
    slow = ["data.dataset=slow:Slow", "data.train=x", "data.val=x", "data.batch_size=16"]
    done = diagnose(folder, *slow, "data.pool_batches=auto", "loader.num_workers=2", "--trace", "3")
    assert done.returncode == 0, done.stderr
    assert "measuring: round 2 of at most 16" in done.stdout
    for part in ("compute ", "supply ", "the training loop ", "feed ratio ", "READ: ", "loader.num_workers=4\n"):
        assert part in done.stdout
    assert (folder / "runs" / "trace.json").exists()
