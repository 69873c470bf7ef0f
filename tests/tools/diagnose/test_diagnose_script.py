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
from harness import ROOT, run_train

QUICK = ("--seconds", "0.05")


def write_project(folder: Path) -> Path:
    """A config of the smallest workload, and files of rows."""
    rng = np.random.default_rng(0)
    for name, n_rows, n_columns in (("train", 1024, 8), ("val", 128, 8), ("wide", 1024, 16)):
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


@pytest.fixture(scope="module")
def diagnosed(tmp_path_factory):
    """The same after a diagnosis, which counts as conclusive however loaded this machine is."""
    folder = write_project(tmp_path_factory.mktemp("diagnosed"))
    done = diagnose(cwd=folder)
    assert done.returncode == 0, done.stderr
    path = folder / "runs" / "diagnosis.json"
    numbers = json.loads(path.read_text()) | {"is_conclusive": True, "summary": "READ: it waits"}
    path.write_text(json.dumps(numbers))
    return folder


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
    assert all(f"measuring: round {number} of 8" in done.stderr for number in range(1, 9))
    for part in ("compute", "supply from the page cache", "supply", "the training loop", "feed ratio"):
        assert f"{part} " in done.stdout
    events = json.loads((folder / "runs" / "trace.json").read_text())["traceEvents"]
    assert sum("Optimizer.step" in event.get("name", "") for event in events) == 3
    numbers = json.loads((folder / "runs" / "diagnosis.json").read_text())
    machine = {"device": "CPU process", "world_size": 1, "local_world_size": 1, "row_bytes": 36}
    assert numbers["machine"] == machine
    assert numbers["config"]["data.tier"] == "disk"


@pytest.mark.slow
def test_two_ranks_as_json_and_an_exit_code_for_a_script(folder):
    done = diagnose("--json", "--min-feed", "1", cwd=folder, ranks=2)
    numbers = json.loads(done.stdout)
    assert done.returncode == (numbers["feed_ratio"] < 1)
    assert numbers["world"] == "2 CPU processes over gloo"
    assert numbers["machine"]["world_size"] == 2
    assert len(numbers["measured"]["ranks_compute_s"]) == 2
    assert numbers["verdict"]["cause"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "ranks", "is_same"),
    [
        (["optim.lr=0.01", "data.tier=host", "train.epochs=2"], 1, True),
        (["model.hidden_dim=32"], 1, False),
        (["data.batch_size=32"], 1, False),
        (["data.train=wide.h5", "data.val=wide.h5"], 1, False),
        ([], 2, False),
    ],
    ids=["same step", "model", "batch size", "row size", "world size"],
)
def test_a_later_run_logs_its_feed_ratio_if_it_takes_the_same_steps(diagnosed, arguments, ranks, is_same):
    name = "-".join(["run", str(ranks), *arguments]).replace("=", "-").replace(".", "-")
    done = run_train(f"run.name={name}", *arguments, ranks=ranks, cwd=diagnosed)
    assert done.returncode == 0, done.stderr
    points = [json.loads(line) for line in (diagnosed / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    ratios = [point["data/feed_ratio"] for point in points if "data/feed_ratio" in point]
    assert bool(ratios) == is_same
    ceiling = json.loads((diagnosed / "runs" / "diagnosis.json").read_text())["compute_rows_per_s"]
    speeds = [point["train/trained_rows_per_s"] for point in points if "train/trained_rows_per_s" in point]
    assert not is_same or ratios == pytest.approx([speed / ceiling for speed in speeds])


@pytest.mark.slow
def test_the_report_of_a_run_shows_the_verdict_on_the_same_settings(diagnosed):
    for name, overrides, is_shown in (("same", [], True), ("other", ["data.tier=disk"], False)):
        done = run_train(f"run.name={name}", *overrides, cwd=diagnosed)
        assert done.returncode == 0, done.stderr
        assert ("READ: it waits" in (diagnosed / "runs" / name / "report.html").read_text()) == is_shown


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
