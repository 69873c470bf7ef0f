"""The command, with real files and processes. What it concludes is tested in test_ceilings.py and test_verdict.py."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import yaml
from harness import ROOT


@pytest.fixture
def folder(tmp_path):
    """A config of the smallest workload, and files of rows."""
    rng = np.random.default_rng(0)
    for name, n_rows in (("train", 1024), ("val", 128)):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file.create_dataset("x", data=rng.normal(size=(n_rows, 8)).astype("f4"), chunks=(16, 8))
            file["y"] = rng.normal(size=n_rows).astype("f4")
    config = {
        "workload": "minimal",
        "data": {"train": "train.h5", "val": "val.h5", "fields": {"x": "x", "y": "y"}},
        "train": {"epochs": 1, "precision": "fp32"},
        "dist": {"device": "cpu"},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


def diagnose(*arguments: str, cwd: Path, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    launcher = []
    if ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run(
        [sys.executable, *launcher, str(ROOT / "diagnose.py"), "--seconds", "0.05", *arguments],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.slow
def test_a_table_and_a_profile(folder):
    done = diagnose("data.tier=disk", "--trace", "3", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "measuring: round 2 of at most 16" in done.stdout
    for part in ("compute", "supply from the page cache", "supply", "the training loop", "feed ratio"):
        assert f"{part} " in done.stdout
    events = json.loads((folder / "runs" / "trace.json").read_text())["traceEvents"]
    assert sum("Optimizer.step" in event.get("name", "") for event in events) == 3


@pytest.mark.slow
def test_two_ranks_as_json(folder):
    done = diagnose("--json", cwd=folder, ranks=2)
    numbers = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert numbers["title"].startswith("2 x CPU over gloo, 64 rows per step")
    assert numbers["config"]["data.batch_size"] == 64
    assert len(numbers["ranks_compute"]) == 2
    assert numbers["verdict"]["cause"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--quick",), "arguments: --quick; usage: "),
        (("loader.num_reader=1",), "did you mean loader.num_readers?"),
        (("data.train=none.h5",), "none.h5 does not exist"),
    ],
)
def test_mistakes_end_in_one_line(folder, arguments, message):
    done = diagnose(*arguments, cwd=folder)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (folder / "runs").exists()


def test_help_names_every_flag():
    done = subprocess.run([sys.executable, "diagnose.py", "-h"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert set(re.findall("--[a-z]+", done.stdout)) >= {"--json", "--seconds", "--trace"}


SLOW_DATASET = """
import time
import numpy as np
from torch.utils.data import Dataset

class Slow(Dataset):
    def __init__(self, path):
        self.x = np.load(path)

    def __len__(self):
        return 512

    def __getitem__(self, row):
        time.sleep(0.02)
        return self.x[row], np.float32(0)
"""


@pytest.mark.slow
def test_a_slow_dataset_is_named_and_more_workers_are_the_cure(folder):
    (folder / "slow.py").write_text(SLOW_DATASET)
    np.save(folder / "x.npy", np.zeros((512, 8), np.float32))
    slow = ["data.dataset=slow:Slow", "data.train=x.npy", "data.val=x.npy", "data.batch_size=16"]
    done = diagnose(*slow, "loader.num_workers=2", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    verdict = json.loads(done.stdout)["verdict"]
    assert (verdict["cause"], verdict["change"]) == ("DECODE", "loader.num_workers=4")
