"""Whole runs on windows of a series: what they print and record, kills and ranks, several sets, and the tools."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import h5py
import numpy as np
import pytest
import train as script

from fastgpu.process import signals
from fastgpu.process.launch import UserError
from fastgpu.process.world import World
from support import PROJECT
from support.ranks import ALONE, in_world, kill_tree, printed_by, train_command
from support.runs import (
    at_call,
    build,
    metrics_of,
    newest,
    same_weights,
    saved_steps,
    signalled,
    step_of,
    train,
    train_rank,
    wait_for_step,
    weights_of,
)

CONFIG = """
workload: minimal
run: {name: a}
data:
  train: ["series.h5::/a", "series.h5::/b", "series.h5::/c"]
  val: 20%
  fields: {x: x, y: y}
  window: 16
  stride: 4
  batch_size: 16
  pool_batches: 4
model: {hidden_dim: 16}
train: {epochs: 3}
dist: {device: cpu}
log: {every_steps: 5}
"""
LENGTHS = {"a": 900, "b": 700, "c": 10}
MORE = ("data.tier=disk", "data.echo=2.5", "optim.accumulation_steps=2", "train.ema=0.9")


@pytest.fixture(autouse=True)
def series(tmp_path, monkeypatch) -> Path:
    """The current folder with config.yaml, and series.h5: x, float32 (steps, 3), and y, sums of the last four steps."""
    rng = np.random.default_rng(0)
    with h5py.File(tmp_path / "series.h5", "w") as file:
        for name, length in LENGTHS.items():
            x = rng.standard_normal((length, 3), np.float32)
            file.create_dataset(f"{name}/x", data=x, chunks=(min(length, 64), 3), compression="gzip")
            file[f"{name}/y"] = np.convolve(x[:, 0], np.ones(4), "full")[:length]
    (tmp_path / "config.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train_until(step: int, *words: str, world: World = ALONE) -> int | str:
    """Train, but a signal comes before this step."""
    with patch.object(script, "train_step", at_call(step, script.train_step, signalled(signal.SIGTERM))):
        return train_rank(world, *words)


def stop_ranks(world: World, step: int, *words: str) -> int | str:
    """A rank, for `in_world`. The ranks ask each other for signals in each step."""
    with patch.object(signals, "MAX_CALLS", 1):
        return train_until(step, *words, world=world)


def run_script(name: str, *words: str) -> str:
    return printed_by([sys.executable, str(PROJECT / name), *words], Path.cwd(), OMP_NUM_THREADS="1")


def test_window_run_says_windows_and_steps(capsys):
    parts = build()
    parts.close()
    printed = capsys.readouterr().out
    n_steps = 1280  # of the two recordings that have room for a window, without the share
    assert f"series.h5::/a and 2 more ({len(parts.splits.train):,} windows of {n_steps:,} steps)" in printed
    assert "1 of 3 recordings" in printed
    assert "x: float32 (N, 16, 3), y: float64 (N, 16)" in printed


def test_window_run_on_every_tier_is_the_same(series):
    for tier in ("device", "host", "disk"):
        assert train(f"run.name={tier}", f"data.tier={tier}", *MORE[1:]) == 0
    for tier in ("host", "disk"):
        assert same_weights(series / "runs/device", series / "runs" / tier)


@pytest.mark.parametrize("stop_at", [1, 37, 60])
def test_window_run_resumes_bit_for_bit(series, stop_at):
    train("run.name=whole", *MORE)
    assert train_until(stop_at, *MORE) == 128 + signal.SIGTERM
    assert step_of(newest(series / "runs/a")) == stop_at
    assert train("run.resume=auto", *MORE) == 0
    for name in ("model", "ema"):
        assert same_weights(series / "runs/whole", series / "runs/a", name)


@pytest.mark.parametrize(
    "word", ["data.window=20", "data.stride=5", "data.val=30%", "data.train=[series.h5::/b, series.h5::/a]"]
)
def test_window_run_refuses_other_windows_inside_an_epoch(series, word):
    assert train_until(7) == 128 + signal.SIGTERM
    with pytest.raises(UserError, match=r"was saved inside an epoch, in which rows, order and ranks cannot change"):
        train("run.resume=auto", word)
    assert train("run.resume=auto") == 0


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("data.canonical_ranks=16",), ("train.steps=50",)])
def test_window_run_on_other_numbers_of_ranks(series, words):
    """Stopped and gone on with another number of ranks, the global batches are the same, so the losses are alike."""
    train("run.name=whole", *MORE, *words)
    assert in_world(2, stop_ranks, 21, *MORE, *words) == [128 + signal.SIGTERM] * 2
    assert in_world(4, stop_ranks, 12, "run.resume=auto", *MORE, *words) == [128 + signal.SIGTERM] * 4
    assert train("run.resume=auto", *MORE, *words) == 0
    whole, run = (metrics_of(series / "runs" / name)[-1] for name in ("whole", "a"))
    assert run["val/mse"] == pytest.approx(whole["val/mse"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_window_run_is_killed_and_resumed(series, ranks):
    words = ("run.checkpoint_every_steps=1", *MORE)
    printed_by(train_command("run.name=whole", *words, ranks=ranks), series)
    run = series / "runs/a"
    with subprocess.Popen(train_command(*words, ranks=ranks), cwd=series, stdout=subprocess.DEVNULL) as process:
        wait_for_step(run, 30, process)
        kill_tree(process)
    last_step = saved_steps(run)[-1]
    assert f"at step {last_step}" in printed_by(train_command(*words, "run.resume=auto", ranks=ranks), series)
    assert same_weights(series / "runs/whole", run)


def test_window_run_with_weights_of_recordings(series):
    weights = "data.train={series.h5::/a: 1, series.h5::/b: 3}"
    for tier in ("disk", "device"):
        assert train(f"run.name={tier}", weights, f"data.tier={tier}") == 0
    assert same_weights(series / "runs/disk", series / "runs/device")


def test_window_run_with_several_sets(series):
    sets = "data.val={share: 20%, b: series.h5::/b, both: [series.h5::/a, series.h5::/b]}"
    train("run.name=one")
    assert train("run.name=several", sets) == 0
    assert same_weights(series / "runs/one", series / "runs/several")
    last = metrics_of(series / "runs/several")[-1]
    assert last["val/share/mse"] == metrics_of(series / "runs/one")[-1]["val/mse"]
    assert {"val/b/mse", "val/both/mse"} <= last.keys()


def test_window_run_validates_and_stops_by_steps(series):
    assert train("train.steps=25", "train.validate_every_steps=10", "train.epochs=1") == 0
    points = [point["step"] for point in metrics_of(series / "runs/a") if "val/mse" in point]
    assert points == [10, 20, 25]


def test_window_run_learns(series):
    """y is a function of the last four steps of x, which a window has but a step has not."""
    assert train("optim.lr=1e-2", "train.epochs=12", "data.stride=1") == 0
    errors = [point["val/mse"] for point in metrics_of(series / "runs/a") if "val/mse" in point]
    assert errors[-1] < 0.5 * errors[0]


def test_window_run_describes_its_model(series):
    train("train.epochs=1")
    card: dict[str, Any] = json.loads((newest(series / "runs/a") / "model.json").read_text())
    assert (card["config"]["data.window"], card["config"]["data.stride"]) == (16, 4)
    assert card["fields"]["x"]["shape"] == [16, 3]
    assert card["n_val_rows"] > 0
    assert weights_of(series / "runs/a")


# ---------------------------------------------------------------------------------------------- the tools


@pytest.fixture
def trained(series) -> Path:
    """A run on files for training and validation, whose windows cannot overlap."""
    words = ("data.train=series.h5::/a", "data.val=series.h5::/b", "train.epochs=1")
    assert train(*words) == 0
    return series / "runs/a"


@pytest.mark.slow
def test_window_run_predicts_by_file_and_first_step(series, trained):
    """Windows are those of validation: in the order of the file, a stride apart."""
    one = run_script("predict.py", "runs/a", "series.h5::/b").splitlines()
    n_windows = -(-(700 - 16 + 1) // 4)
    title, *lines = [line for line in one if "," in line and not line.startswith("model")]
    lines = lines[:n_windows]
    names = title.split(",")
    place = names.index("first_step")
    assert [int(line.split(",")[place]) for line in lines] == [*range(0, 685, 4)]
    run_script("predict.py", "runs/a", "series.h5::/b", "series.h5::/a", "-o", "out.csv")
    title, *lines = Path("out.csv").read_text().splitlines()
    names = title.split(",")
    found = [line.split(",") for line in lines]
    assert names[0] == "file"
    assert [line[0] for line in found] == ["series.h5::/b"] * 172 + ["series.h5::/a"] * 222
    assert [int(line[names.index("first_step")]) for line in found] == [*range(0, 685, 4), *range(0, 885, 4)]


@pytest.mark.slow
def test_window_run_evaluates_as_validated(series, trained):
    printed = run_script("predict.py", "runs/a", "--evaluate", "series.h5::/b")
    expected = metrics_of(trained)[-1]["val/mse"]
    assert float(re.search(r"(?m)^mse ([\d.]+)", printed)[1]) == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_window_run_is_reported_and_diagnosed(series, trained):
    assert "best mse" in run_script("report.py", "runs/a")
    assert "\nruns/a " in run_script("report.py", "--compare", "runs/a")
    for tier in ("disk", "host", "device"):
        assert "see also" in run_script("diagnose.py", "--seconds", "0.05", f"data.tier={tier}")
