"""The training loop, with the workload `minimal` on made-up rows: whole runs, in this process where that is enough."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import psutil
import pytest
import torch
import train as script
import yaml
from harness import (
    ALONE,
    TIMEOUT_S,
    metrics_of,
    run_ranks,
    run_train,
    same_weights,
    step_of,
    train_command,
    weights_of,
    write_state,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torch.utils.data import Dataset

from fastgpu.process.config_loader import load_config
from fastgpu.process.launch import UserError
from fastgpu.report.results import read_run
from workloads import minimal

STEPS_PER_EPOCH = 21
TAGS = {
    "train/loss",
    "train/grad_norm",
    "train/lr",
    "train/trained_rows_per_s",
    "train/step_ms",
    "data/fresh_rows_per_s",
    "data/wait_pct",
    "data/echo",
    "val/mse",
}


def train(*overrides: str) -> int:
    """`python train.py` of the current folder, in this process. Returns the exit code."""
    return script.train(script.build(load_config(list(overrides)), ALONE), ALONE)


def stop_training_at(n_steps: int, patch: pytest.MonkeyPatch) -> None:
    """Make the step with this number raise RuntimeError."""
    step = script.train_step
    counted = [0]

    def stop_or_step(*arguments: Any) -> Tensor:
        counted[0] += 1
        if counted[0] == n_steps:
            raise RuntimeError("stopped")
        return step(*arguments)

    patch.setattr(script, "train_step", stop_or_step)


def signalling(function: Callable[..., Any], n_calls: int, number: signal.Signals) -> Callable[..., Any]:
    """The function; the call with this number sends a signal to this process."""
    counted = [0]

    def call(*arguments: Any) -> Any:
        counted[0] += 1
        if counted[0] == n_calls:
            os.kill(os.getpid(), number)
        return function(*arguments)

    return call


def val_points(run: Path) -> list[dict[str, float]]:
    return [point for point in metrics_of(run) if "val/mse" in point]


def saved_steps(run: Path) -> list[int]:
    steps = []
    for path in run.glob("checkpoints/last-*"):
        with suppress(FileNotFoundError):  # it has just been removed
            steps.append(step_of(path))
    return sorted(steps)


def wait_for_step(run: Path, step: int, process: subprocess.Popen) -> None:
    """Wait until a run has saved this step or a later one."""
    deadline = time.monotonic() + TIMEOUT_S
    while not any(number >= step for number in saved_steps(run)):
        assert process.poll() is None, "the run ended too early"
        assert time.monotonic() < deadline, "the run did not come so far"
        time.sleep(0.01)


# ---------------------------------------------------------------------------------------------- files of a run


def test_a_run_leaves_a_record(folder, capsys):
    train()
    printed = capsys.readouterr().out
    run = folder / "runs/a"
    points = metrics_of(run)
    assert points[-1]["step"] == 3 * STEPS_PER_EPOCH
    tags = {name for name in set().union(*points) if "/" in name}
    assert {tag for tag in tags if not tag.startswith("host/")} == TAGS
    events = EventAccumulator(str(run))
    events.Reload()
    assert set(events.Tags()["scalars"]) == tags
    assert "config/text_summary" in events.Tags()["tensors"]
    files = {path.name for path in run.iterdir()}
    assert {"config.yaml", "run.json", "metrics.jsonl", "checkpoints"} <= files
    assert len(list(run.glob("checkpoints/best-*"))) == 1
    assert "1 CPU process" in printed
    assert "on the device tier" in printed
    assert "tensorboard --logdir runs" in printed.splitlines()[-1]


def test_the_config_of_a_run_repeats_it(folder):
    train()
    written = yaml.safe_load((folder / "runs/a/config.yaml").read_text())
    assert written["data"]["tier"] == "device"  # no `auto` is left where a number was chosen
    assert isinstance(written["data"]["pool_batches"], int)
    assert isinstance(written["loader"]["num_readers"], int)
    assert written["train"]["precision"] == "fp32"
    assert written["model"] == {"hidden_dim": 64}  # the defaults of the workload, too
    script.train(script.build(load_config(["--config", "runs/a/config.yaml", "run.name=b"]), ALONE), ALONE)
    assert same_weights(folder / "runs/a", folder / "runs/b")


def test_the_best_checkpoint_is_that_of_the_lowest_error(folder):
    train()
    errors = {point["step"]: point["val/mse"] for point in val_points(folder / "runs/a")}
    (best,) = (folder / "runs/a/checkpoints").glob("best-*")
    assert step_of(best) == min(errors, key=errors.get)
    progress = json.loads((best / "state.json").read_text())["progress"]
    assert progress["best"] == min(errors.values())


# ---------------------------------------------------------------------------------------------- same weights


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_every_tier_trains_the_same_weights(folder, tier):
    train("run.name=device", "data.tier=device")
    train(f"run.name={tier}", f"data.tier={tier}", "loader.num_readers=3", "loader.prefetch_pools=1")
    assert same_weights(folder / "runs/device", folder / "runs" / tier)


MIXTURE = "data.train={rows.h5::/train: 1, rows.h5::/val: 2}"


@pytest.mark.parametrize(
    ("echo", "stop_at", "more"), [("1", 30, ()), ("2.5", 75, ()), ("1", 30, (MIXTURE, "data.val=10%"))]
)
def test_a_run_that_stops_inside_an_epoch_is_resumed_to_the_same_weights(folder, monkeypatch, echo, stop_at, more):
    options = ("data.tier=disk", f"data.echo={echo}", "run.checkpoint_every_steps=1", "train.epochs=2", *more)
    train("run.name=whole", *options)
    with monkeypatch.context() as patch:
        stop_training_at(stop_at, patch)
        with pytest.raises(RuntimeError, match="stopped"):
            train("run.name=stopped", *options)
    run = folder / "runs/stopped"
    assert stop_at - 13 < saved_steps(run)[-1] < stop_at  # a pool has 4 steps, echoed up to 12
    train("run.name=stopped", "run.resume=auto", *options)
    assert same_weights(folder / "runs/whole", run)
    assert val_points(run)[-1]["val/mse"] == val_points(folder / "runs/whole")[-1]["val/mse"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR2])
@pytest.mark.parametrize(("echo", "stop_at"), [("1", 1), ("1", 30), ("2.5", 75), ("2.5", 58)])
def test_a_signal_saves_the_step_that_it_meets(folder, monkeypatch, capsys, number, echo, stop_at):
    options = ("data.tier=disk", f"data.echo={echo}", "train.epochs=2", "data.pool_batches=7")
    train("run.name=whole", *options)
    with monkeypatch.context() as patch:
        patch.setattr(script, "train_step", signalling(script.train_step, stop_at, number))
        assert train("run.name=stopped", *options) == 128 + number
    run = folder / "runs/stopped"
    assert f"asked to stop at step {stop_at}, which is saved" in capsys.readouterr().out
    assert json.loads((run / "stopped.json").read_text())["step"] == stop_at
    assert saved_steps(run)[-1] == stop_at
    assert [point["step"] for point in read_run(run).points if "train/loss" in point][-1] == stop_at
    assert train("run.name=stopped", "run.resume=auto", *options) == 0
    assert not (run / "stopped.json").exists()
    assert same_weights(folder / "runs/whole", run)
    assert val_points(run)[-1]["val/mse"] == val_points(folder / "runs/whole")[-1]["val/mse"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR2])
def test_a_signal_does_not_disturb_the_end_of_a_run(folder, monkeypatch, number, capsys):
    monkeypatch.setattr(script.Run, "close", signalling(script.Run.close, 1, number))
    assert train("train.epochs=1") == 0
    assert "done: epoch 1" in capsys.readouterr().out


def test_a_signal_ends_a_validation_which_is_made_when_the_run_is_resumed(folder, monkeypatch):
    options = ("data.tier=disk", "train.epochs=1", "data.pool_batches=1")
    train("run.name=whole", *options)
    with monkeypatch.context() as patch:
        score = signalling(minimal.Workload.score, 2, signal.SIGTERM)

        def score_method(*arguments: Any) -> Any:
            return score(*arguments)

        patch.setattr(minimal.Workload, "score", score_method)
        assert train("run.name=stopped", *options) == 128 + signal.SIGTERM
    assert not val_points(folder / "runs/stopped")
    train("run.name=stopped", "run.resume=auto", *options)
    assert val_points(folder / "runs/stopped")[-1]["val/mse"] == val_points(folder / "runs/whole")[-1]["val/mse"]
    assert same_weights(folder / "runs/whole", folder / "runs/stopped")


@pytest.mark.slow
def test_one_run_has_one_writer(folder):
    command = train_command("train.epochs=100000", "run.resume=auto")
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL) as first:
        try:
            wait_for_step(folder / "runs/a", 21, first)
            second = run_train("train.epochs=100000", "run.resume=auto", cwd=folder)
            assert second.returncode == 2
            assert f"error: runs/a is in use by process {first.pid} on " in second.stderr
            first.send_signal(signal.SIGTERM)
            assert first.wait(TIMEOUT_S) == 128 + signal.SIGTERM
        finally:
            first.kill()


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_rank_outlives_its_launcher(folder, number):
    with subprocess.Popen(train_command("train.epochs=100000", ranks=2), cwd=folder, stdout=subprocess.DEVNULL) as job:
        try:
            wait_for_step(folder / "runs/a", 21, job)
            ranks = psutil.Process(job.pid).children(recursive=True)
            assert len(ranks) >= 2
            job.send_signal(number)
            job.wait(TIMEOUT_S)
            _, alive = psutil.wait_procs(ranks, timeout=TIMEOUT_S)
            assert not alive
        finally:
            job.kill()
    if number == signal.SIGTERM:
        assert (folder / "runs/a/stopped.json").exists()


def test_weights_that_are_not_finite_are_never_saved(folder, monkeypatch):
    step = script.train_step

    def step_to_nan(parts: script.Parts, *arguments: Any) -> Tensor:
        loss = step(parts, *arguments)
        if run_steps(parts) == 30:
            next(parts.model.parameters()).data.fill_(float("nan"))
        return loss

    def run_steps(parts: script.Parts) -> int:
        return int(next(iter(parts.optimizer.state.values()))["step"])

    monkeypatch.setattr(script, "train_step", step_to_nan)
    with pytest.raises(UserError, match=r"not finite at step 3\d; nothing is saved"):
        train("run.checkpoint_every_steps=4", "log.every_steps=100000")
    assert saved_steps(folder / "runs/a")[-1] < 30
    monkeypatch.setattr(script, "train_step", step)
    train("run.resume=auto")  # from finite weights


def test_the_average_of_the_weights_is_validated_saved_and_resumed_and_changes_nothing_else(folder, monkeypatch):
    options = ("data.tier=disk", "run.checkpoint_every_steps=1", "train.epochs=2")
    train("run.name=plain", *options)
    train("run.name=whole", "train.ema=0.9", *options)
    with monkeypatch.context() as patch:
        stop_training_at(30, patch)
        with pytest.raises(RuntimeError, match="stopped"):
            train("run.name=stopped", "train.ema=0.9", *options)
    train("run.name=stopped", "train.ema=0.9", "run.resume=auto", *options)
    plain, whole, stopped = (folder / "runs" / name for name in ("plain", "whole", "stopped"))
    assert same_weights(plain, whole)  # the weights that are trained
    assert same_weights(whole, stopped)
    assert same_weights(whole, stopped, "ema")
    assert not list(plain.glob("checkpoints/*/ema.pt"))
    errors = [[point["val/mse"] for point in val_points(run)] for run in (plain, whole, stopped)]
    assert errors[1] == errors[2] != errors[0]


def test_averaging_may_begin_and_end_when_a_run_is_resumed(folder):
    train("train.epochs=1")
    train("train.epochs=2", "train.ema=0.9", "run.resume=auto")
    run = folder / "runs/a"
    average = weights_of(run, "ema")
    assert average["n_averaged"] == STEPS_PER_EPOCH
    train("train.epochs=3", "run.resume=auto")
    assert len(val_points(run)) == 3


@pytest.mark.parametrize("change", ["data.train={rows.h5::/train: 1, rows.h5::/val: 3}", "data.val=11%"])
def test_other_weights_or_another_validation_share_are_refused_inside_an_epoch(folder, change):
    train("train.epochs=1", MIXTURE, "data.val=10%")
    (state,) = (folder / "runs/a/checkpoints").glob("last-*/state.json")
    saved = json.loads(state.read_text())
    saved["progress"] |= {"epoch": 0, "pool": 0, "pool_steps": 4, "best": None}
    write_state(state, saved)
    with pytest.raises(UserError):
        train("train.epochs=1", MIXTURE, "data.val=10%", "run.resume=auto", change)
    train("train.epochs=1", MIXTURE, "data.val=10%", "run.resume=auto")


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 4])  # sums of two have one order only
def test_a_run_that_is_killed_is_resumed_to_the_same_weights(folder, ranks):
    options = ("data.echo=2.5", "run.checkpoint_every_steps=1", "data.tier=disk", "train.epochs=6", "train.ema=0.9")
    assert run_train("run.name=whole", *options, ranks=ranks, cwd=folder).returncode == 0
    command = train_command("run.name=killed", *options, ranks=ranks)
    run = folder / "runs/killed"
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_for_step(run, 60, process)  # inside the second epoch, which has 52 or 53 steps
        for running in (*psutil.Process(process.pid).children(recursive=True), process):
            running.kill()
    last_step = saved_steps(run)[-1]
    done = run_train("run.name=killed", *options, "run.resume=auto", ranks=ranks, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert f"at step {last_step}" in done.stdout
    assert same_weights(folder / "runs/whole", run)
    assert same_weights(folder / "runs/whole", run, "ema")
    assert val_points(run)[-1]["val/mse"] == val_points(folder / "runs/whole")[-1]["val/mse"]


def test_a_run_killed_between_the_last_pool_and_validation_continues_with_the_validation(folder):
    train("train.epochs=1")
    (state,) = (folder / "runs/a/checkpoints").glob("last-*/state.json")
    saved = json.loads(state.read_text())
    pools = -(-STEPS_PER_EPOCH // saved["order"]["pool_batches"])
    saved["progress"] |= {"epoch": 0, "pool": pools, "best": None}
    write_state(state, saved)
    train("train.epochs=2", "run.resume=auto")
    assert [point["step"] for point in val_points(folder / "runs/a")] == [21, 21, 42]


def test_the_newest_run_is_resumed_by_itself_and_a_finished_one_ends_at_once(folder, capsys):
    train("run.name=old", "train.epochs=1")
    train("run.name=new", "train.epochs=1")
    train("run.name=auto", "train.epochs=2", "run.resume=auto")
    assert [point["step"] for point in val_points(folder / "runs/new")] == [21, 42]
    capsys.readouterr()
    train("run.name=auto", "train.epochs=2", "run.resume=auto")
    assert "done: epoch 2, step 42" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"runs/new holds a run; use run.resume=auto to continue it"):
        train("run.name=new")


def test_a_run_goes_on_with_its_own_settings_but_for_the_words(folder):
    train("optim.lr=0.02", "model.hidden_dim=8", "train.epochs=1")
    train("run.resume=runs/a", "train.epochs=2")
    recorded = yaml.safe_load((folder / "runs/a/config-2.yaml").read_text())
    assert (recorded["optim"]["lr"], recorded["model"]["hidden_dim"], recorded["train"]["epochs"]) == (0.02, 8, 2)
    assert len(val_points(folder / "runs/a")) == 2


# ---------------------------------------------------------------------------------------------- another run than before


def test_the_newest_run_is_not_resumed_with_another_model_or_data(folder):
    train("train.epochs=1", "model.hidden_dim=8")
    message = "runs/a was trained with model.hidden_dim=8, this is model.hidden_dim=64; run.name=auto takes the newest"
    with pytest.raises(UserError, match=message):
        train("train.epochs=2", "run.name=auto", "run.resume=auto")
    message = (
        r"last-00000\d/model.pt does not fit: size mismatch for 0.weight: copying a param .* "
        "runs/a was trained with model.hidden_dim=8, this is model.hidden_dim=64$"
    )
    with pytest.raises(UserError, match=message):
        train("train.epochs=2", "run.resume=auto")
    assert len(val_points(folder / "runs/a")) == 1


def test_a_run_that_is_resumed_with_other_settings_says_so(folder, capsys):
    train("train.epochs=1")
    capsys.readouterr()
    train("train.epochs=2", "optim.lr=0.01", "data.batch_size=64", "run.seed=3", "run.resume=auto")
    lines = capsys.readouterr().out.splitlines()
    for line in (
        "resumed with train.epochs=2 (was 1): the learning rate follows the new length",
        "resumed with optim.lr=0.01 (was 0.003)",
        "resumed with data.batch_size=64 (was 32)",
        "resumed with run.seed=3 (was 0)",
    ):
        assert line in lines


def test_a_run_that_is_done_says_that_nothing_is_left_to_train(folder, capsys):
    train("train.epochs=2")
    assert "nothing is left" not in capsys.readouterr().out
    train("train.epochs=1", "run.resume=auto")
    assert "runs/a: epoch 2 is done, so nothing is left to train; raise train.epochs (1)" in capsys.readouterr().out


def test_a_name_that_is_taken_ends_the_program_before_torch_is_imported(folder):
    (folder / "runs/a/checkpoints/last-000001").mkdir(parents=True)
    (folder / "trap").mkdir()
    (folder / "trap/torch.py").write_text("raise SystemExit('torch was imported')")
    done = run_train("run.name=a", cwd=folder, PYTHONPATH=str(folder / "trap"))
    assert done.returncode == 2
    assert done.stderr.startswith("error: run.name: runs/a holds a run; use run.resume=auto to continue it")


# ---------------------------------------------------------------------------------------------- echo


class SlowRows(Dataset):
    """Rows that take 10 ms to read, which is far longer than training on one takes."""

    def __init__(self, path: str):
        self.n_rows = 128

    def __len__(self) -> int:
        return self.n_rows

    def __getitem__(self, row: int) -> tuple[np.ndarray, float]:
        time.sleep(0.01)
        return np.full(6, row / 128, np.float32), row / 128


# ---------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.train=nowhere.h5"], "data.train: nowhere.h5 does not exist"),
        (["data.val=nowhere.h5"], "data.val: nowhere.h5 does not exist"),
        (["data.batch_size=2000"], "data.batch_size is 2000, but rows.h5::/train has 700 rows; use at most 700"),
        (["data.batch_size=30", "optim.accumulation_steps=4"], "data.batch_size is 30; it should be a multiple of 4"),
        (["run.folder=/proc/nowhere"], "run.folder: cannot write to /proc/nowhere"),
        (["workload=tables"], r"workload is tables, but workloads/tables.py does not exist; there are: .*minimal"),
        (["model.hidden_dim=wide"], 'command line: model.hidden_dim is "wide"; it should be a valid integer'),
        (["model.hiden_dim=3"], r"unknown key model.hiden_dim \(did you mean model.hidden_dim\?\)"),
        (["model.made_up_by_nobody=3"], r"unknown key model.made_up_by_nobody \(allowed are: model.hidden_dim"),
        (["optim.name=fused_lamb"], "optim.name is fused_lamb, but .*apex"),
        (["optim.lr=1e30"], r"the loss is (nan|inf) at step \d+; lower optim.lr \(1e\+30\)"),
    ],
)
def test_a_mistake_is_a_user_error(folder, overrides, message):
    with pytest.raises(UserError, match=message):
        train(*overrides)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("data.batch_siz=3", "error: command line: unknown key data.batch_siz (did you mean data.batch_size?)"),
        ("data.train=nowhere.h5", "error: data.train: nowhere.h5 does not exist"),
        ("dist.strategy=dp", "error: dist.strategy is dp, which drives all GPUs from one process, but there are 2"),
        ("optim.lr=1e30", "error: the loss is "),
    ],
)
def test_a_mistake_is_one_line_and_the_same_exit_code_on_every_rank(folder, argument, message):
    done = run_ranks(argument, ranks=2, cwd=folder)
    assert [process.returncode for process in done] == [2, 2]
    lines = [line for process in done for line in process.stderr.splitlines() if not line.startswith("[W")]
    assert len(lines) == 1, lines
    assert lines[0].startswith(message)
    assert not list(folder.glob("**/*.partial"))


@pytest.mark.slow
def test_more_ranks_than_blocks(folder):
    with h5py.File(folder / "one.h5", "w") as file:
        file.create_dataset("x", data=np.zeros((40, 6), np.float32), chunks=(40, 6))
        file["y"] = np.zeros(40)
    done = run_ranks("data.train=one.h5", "data.val=one.h5", "data.batch_size=8", ranks=2, cwd=folder)
    assert [process.returncode for process in done] == [2, 2]
    assert "2 ranks are more than the 1 blocks (chunks)" in done[0].stderr
    assert done[1].stderr == ""


# ---------------------------------------------------------------------------------------------- faults of the machine


def test_a_run_whose_last_checkpoint_is_not_written_ends_with_an_error(folder, capsys):
    (folder / "runs/a").mkdir(parents=True)
    (folder / "runs/a/checkpoints").symlink_to("/proc/self")  # takes no file: the same as a full disk
    with pytest.raises(UserError, match="the run is over, but its last checkpoint is not in runs/a: make room"):
        train("train.epochs=2")
    printed = capsys.readouterr().out
    assert "was not written: " in printed
    assert [point["step"] for point in val_points(folder / "runs/a")] == [21, 42]  # it trained to the end


@pytest.mark.slow
def test_a_last_checkpoint_that_is_missing_is_an_error_of_every_rank(folder):
    (folder / "runs/a").mkdir(parents=True)
    (folder / "runs/a/checkpoints").symlink_to("/proc/self")
    done = run_ranks("train.epochs=1", ranks=2, cwd=folder)
    assert [process.returncode for process in done] == [2, 2]
    assert "error: the run is over, but its last checkpoint is not in" in done[0].stderr
    assert done[1].stderr == ""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="an open file cannot be truncated")
def test_a_file_that_is_cut_during_training_stops_the_run_with_its_name(folder):
    with h5py.File(folder / "long.h5", "w") as file:
        file.create_dataset("x", data=np.ones((4000, 3000), np.float32), chunks=(20, 3000))
        file["y"] = np.zeros(4000)
    path = folder / "long.h5"
    overrides = ("data.train=long.h5", "data.val=long.h5", "data.tier=disk", "data.pool_batches=1", "log.every_steps=1")
    command = train_command(*overrides, "train.epochs=1000")
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as run:
        while not (folder / "runs/a/metrics.jsonl").exists():
            time.sleep(0.01)
            assert run.poll() is None
        os.truncate(path, path.stat().st_size // 4)
        _, error = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode != 0
    if run.returncode == -signal.SIGBUS:  # a reader was just copying out of the mapping: no one can catch that
        assert "Fatal Python error: Bus error" in error
        return
    lines = [line for line in error.splitlines() if line.startswith("error:")]
    assert len(lines) == 1, error
    assert re.search(r"long.h5 (was changed|ends at byte .*) while in use; restore the file", lines[0])
    assert "Traceback" not in error


# ---------------------------------------------------------------------------------------------- several ranks


@pytest.mark.slow
def test_two_ranks_train_stop_and_resume_under_torchrun(folder):
    first = run_train("train.epochs=1", ranks=2, cwd=folder)
    assert first.returncode == 0, first.stderr
    assert "2 CPU processes over gloo" in first.stdout
    assert first.stdout.count("epoch 1/1") == 1  # one rank prints
    second = run_train("train.epochs=2", "run.name=auto", "run.resume=auto", ranks=2, cwd=folder)
    assert second.returncode == 0, second.stderr
    assert "runs/a: 2 CPU processes" in second.stdout  # the newest run is found by itself
    assert [point["step"] for point in val_points(folder / "runs/a")] == [21, 42]
    third = run_train("train.epochs=2", "run.resume=auto", ranks=2, cwd=folder)
    assert third.returncode == 0
    assert "done: epoch 2, step 42" in third.stdout


@pytest.mark.slow
def test_two_ranks_train_the_weights_of_one(folder):
    """The global batches are the same; only the order in which gradients are summed differs."""
    train("run.name=one", "optim.name=sgd", "optim.lr=0.01")
    done = run_train("run.name=two", "optim.name=sgd", "optim.lr=0.01", ranks=2, cwd=folder)
    assert done.returncode == 0, done.stderr
    one = val_points(folder / "runs/one")
    two = val_points(folder / "runs/two")
    assert [p["val/mse"] for p in one] == pytest.approx([p["val/mse"] for p in two], rel=1e-4)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_killed_rank_is_restarted_by_torchrun(folder):
    arguments = ("run.resume=auto", "run.checkpoint_every_steps=1", "train.epochs=20")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    command = [sys.executable, *launcher, *train_command(*arguments)[1:]]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        wait_for_step(folder / "runs/a", 30, running)
        children = psutil.Process(running.pid).children()
        ranks = [child for child in children if any(word.endswith("train.py") for word in child.cmdline())]
        ranks[-1].kill()
        assert running.wait(TIMEOUT_S) == 0
    assert metrics_of(folder / "runs/a")[-1]["step"] == 20 * STEPS_PER_EPOCH


# ---------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    "overrides",
    [
        ["optim.accumulation_steps=4", "optim.name=sgd", "optim.lr=0.05"],
        ["train.precision=bf16"],
        ["data.batch_size=50", "data.pool_batches=3", "run.seed=3"],
        ["run.checkpoint_every_steps=4", "data.echo=1.7", "loader.prefetch_pools=1", "data.tier=disk"],
    ],
)
def test_other_settings_train_too(folder, overrides):
    train(*overrides)
    errors = [point["val/mse"] for point in val_points(folder / "runs/a")]
    assert errors[-1] < errors[0]
    assert all(torch.isfinite(torch.tensor(errors)))
