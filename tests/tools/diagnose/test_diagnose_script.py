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

QUICK = ("--seconds", "0.05")


def write_project(folder: Path) -> Path:
    """A config of the smallest workload, and files of rows."""
    rng = np.random.default_rng(0)
    for name, n_rows, n_columns in (("train", 1024, 8), ("val", 128, 8)):
        with h5py.File(folder / f"{name}.h5", "w") as file:
            file.create_dataset("x", data=rng.normal(size=(n_rows, n_columns)).astype("f4"), chunks=(16, n_columns))
            file["y"] = rng.normal(size=n_rows).astype("f4")
    config = {
        "workload": "minimal",
        "data": {"train": "train.h5", "val": "val.h5", "fields": {"x": "x", "y": "y"}},
        "train": {"epochs": 1, "precision": "fp32"},
        "dist": {"device": "cpu"},
        "log": {"every_steps": 4},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


@pytest.fixture
def folder(tmp_path):
    return write_project(tmp_path)


def diagnose(*arguments: str, cwd: Path, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    launcher = []
    if ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run(
        [sys.executable, *launcher, str(ROOT / "diagnose.py"), *QUICK, *arguments],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.slow
def test_a_table_and_a_profile(folder):
    done = diagnose("data.tier=disk", "--trace", "3", "--min-feed", "0.01", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert all(f"measuring: round {number} of at most 16" in done.stderr for number in range(1, 4))
    for part in ("compute", "supply from the page cache", "supply", "the training loop", "feed ratio"):
        assert f"{part} " in done.stdout
    events = json.loads((folder / "runs" / "trace.json").read_text())["traceEvents"]
    assert sum("Optimizer.step" in event.get("name", "") for event in events) == 3


@pytest.mark.slow
def test_two_ranks_as_json_and_an_exit_code_for_a_script(folder):
    done = diagnose("--json", "--min-feed", "1", cwd=folder, ranks=2)
    numbers = json.loads(done.stdout)
    assert done.returncode == (numbers["feed_ratio"] < 1)
    assert numbers["world"] == "2 CPU processes over gloo"
    assert numbers["machine"] == {"device": "CPU process", "world_size": 2, "local_world_size": 2, "row_bytes": 36}
    assert numbers["config"]["data.batch_size"] == 64
    assert len(numbers["measured"]["ranks_compute_s"]) == 2
    assert numbers["verdict"]["cause"]


@pytest.mark.slow
def test_mistakes_end_in_one_line(folder):
    before = files(folder)
    for arguments, message in {
        ("--seconds", "0"): "--seconds is 0; it should be above 0 and below an hour",
        ("--seconds", "nan"): "--seconds is nan; it should be above 0",
        ("--min-feed", "95"): "--min-feed is 95; it should be a ratio from 0 to 1, such as 0.95",
        ("--trace", "-1"): "--trace is -1; it should be a number of steps",
        ("--seconds", "soon"): "invalid float value: 'soon'",
        ("loader.num_reader=1",): "did you mean loader.num_readers?",
        ("model.hidden=1",): "did you mean model.hidden_dim?",
        ("--quick",): '"--quick" is not understood',
        ("data.train=none.h5",): "none.h5 does not exist",
    }.items():
        done = diagnose(*arguments, cwd=folder)
        assert done.returncode == 2
        assert message in done.stderr, done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert files(folder) == before


def test_help_names_every_flag():
    done = subprocess.run([sys.executable, "diagnose.py", "-h"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    flags = set(re.findall(r'"(--[a-z-]+)"', (ROOT / "diagnose.py").read_text())) - {"--help"}
    assert {"--json", "--seconds", "--min-feed", "--trace"} == flags
    assert all(flag in done.stdout for flag in flags)


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
        time.sleep(0.005)
        return self.x[row], np.float32(0)
"""


@pytest.mark.slow
def test_a_slow_dataset_is_named(folder):
    """As the cause or, if other programs use the machine, as a candidate."""
    (folder / "slow.py").write_text(SLOW_DATASET)
    np.save(folder / "x.npy", np.zeros((512, 8), np.float32))
    slow = ["data.dataset=slow:Slow", "data.train=x.npy", "data.val=x.npy", "data.batch_size=16"]
    done = diagnose(*slow, "loader.num_workers=1", "--seconds", "0.2", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "DECODE" in done.stdout
