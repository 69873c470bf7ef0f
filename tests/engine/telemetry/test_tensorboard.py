import io
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from math import inf, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fastgpu.process.launch import UserError
from fastgpu.process.world import World
from fastgpu.report.results import read_run
from fastgpu.telemetry import tensorboard
from fastgpu.telemetry.clock import Throughput
from fastgpu.telemetry.tensorboard import TensorBoard
from support.ranks import ALONE, CPU, wait_until
from support.runs import metrics_of

STEP = Throughput(seconds=1.0, wait_s=0.1, fresh_rows=10.0, trained_rows=10.0, steps=5)
FULL = Mock(side_effect=OSError(28, "No space left on device"))


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """The clocks of this module. They move only when they are told to."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now, time=lambda: 1000 + clock.now)
    monkeypatch.setattr(tensorboard, "time", clock)
    return clock


@pytest.fixture
def board(tmp_path) -> Iterator[Callable[..., TensorBoard]]:
    """board(step=0, ...) -> the log of a run in tmp_path that begins at this step."""
    with ExitStack() as stack:

        def make(step: int = 0, world: World = ALONE, **config: Any):
            settings = {"log.wandb": "", "train.epochs": 1, "train.steps": 0, "train.validate_every_steps": 0, **config}
            return stack.enter_context(TensorBoard(tmp_path, settings, world, step=step))

        yield make


def events_in(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return events


def losses_in(folder: Path) -> list[tuple[int, float]]:
    """(step, loss) as TensorBoard shows them."""
    return [(event.step, event.value) for event in events_in(folder).Scalars("train/loss")]


def test_log_of_other_ranks_is_silent(board, tmp_path, capsys):
    log = board(world=World(1, 1, 1, CPU))
    log.write(1, {"train/loss": 1.0}, STEP)
    log.write_validation(1, 1, {"val/x": 1.0})
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().out == ""


def test_log_of_a_resumed_run_counts_points_once(board, tmp_path, clock):
    """A run is killed at step 30, resumed from a checkpoint at step 20, and killed and resumed there again."""
    for step, loss, steps in ((0, 1.0, (10, 20, 30)), (20, 2.0, (25, 30, 35)), (20, 3.0, (25, 30, 35))):
        for path in tmp_path.glob("events.*"):  # TensorBoard orders files by the second in their names
            path.rename(path.with_name(re.sub(r"\d{10}", lambda n: str(int(n[0]) - 10), path.name, count=1)))
        clock.now += 60
        with board(step=step) as log:
            for each in steps:
                log.write(each, {"train/loss": loss}, STEP)
    points = read_run(tmp_path).points
    expected = [(10, 1), (20, 1), (25, 3), (30, 3), (35, 3)]
    assert [(point["step"], point["train/loss"]) for point in points] == expected == losses_in(tmp_path)
    assert Throughput(*(points[0][name] for name in Throughput._fields)) == STEP  # sums, for means over the run
    first, _, last = dict.fromkeys(point["part"] for point in metrics_of(tmp_path))
    assert [point["part"] for point in points] == [first, first, last, last, last]
    tags = events_in(tmp_path).Tags()
    assert set(tags["scalars"]) == {"train/loss", *STEP.scalars()}
    assert "config/text_summary" in tags["tensors"]


def test_log_of_infinite_numbers(board, tmp_path):
    board().write(1, {"train/loss": 1.0, "train/grad_norm": inf, "val/x": nan})
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    point = json.loads(line, parse_constant=pytest.fail)
    assert (point["train/loss"], point["train/grad_norm"], point["val/x"]) == (1.0, None, None)
    assert {"train/grad_norm", "val/x"}.isdisjoint(read_run(tmp_path).points[0])


def test_log_on_a_full_disk_warns_once(board, tmp_path, monkeypatch, capsys):
    log = board()
    with monkeypatch.context() as patch:
        patch.setattr(tensorboard, "open_to_append", FULL)
        patch.setattr(tensorboard.SummaryWriter, "add_scalar", FULL)
        for step in range(3):
            log.write(step, {"train/loss": 1.0})
    log.write(9, {"train/loss": 1.0})  # the disk has room again
    log.__exit__(None)
    assert len(re.findall("warning: cannot log to .*; training continues", capsys.readouterr().out)) == 1
    assert losses_in(tmp_path) == [(9, 1.0)]
    monkeypatch.setattr(tensorboard, "SummaryWriter", FULL)  # full from the start
    board().write(10, {"train/loss": 1.0})
    assert capsys.readouterr().out.count("training continues") == 1
    assert [point["step"] for point in metrics_of(tmp_path)] == [9, 10]


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_log_is_a_file_of_its_own(board, tmp_path, capsys, kind):
    """The folder of a run that is resumed may be a stranger's."""
    path, victim = tmp_path / "metrics.jsonl", tmp_path / "victim"
    victim.write_text("mine")
    path.symlink_to(victim) if kind == "link" else os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    board().write(1, {"train/loss": 1.0})
    os.close(reader)
    assert victim.read_text() == "mine"
    assert capsys.readouterr().out.count("warning: cannot log to") == 1


def test_log_progress_lines(board, clock, capsys):
    log = board(step=2)
    for second in range(11):
        clock.now = second
        log.count(second + 3, (second + 2.5) / 20)
        log.write(second, {"train/loss": 1.0}, STEP)
    lines = capsys.readouterr().out.splitlines()
    assert [re.sub(":.*,", " ...", line) for line in lines] == ["step 5 ... 38 % done", "step 10 ... 62 % done"]


@pytest.mark.parametrize(
    ("waits_s", "epoch_steps", "is_bound"),
    [((0.9, 0.3), 4, True), ((0.15, 0.02), 4, False), ((0.9, 0.3), 5, False)],  # 4 of 5 steps, after a resume
)
def test_log_epoch_line_means_and_waiting(board, capsys, waits_s, epoch_steps, is_bound):
    log = board(**{"train.epochs": 2})
    for n_steps, loss, wait_s in zip((1, 3), (4.0, 2.0), waits_s, strict=True):  # two reports of unequal length
        log.write(n_steps, {"train/loss": loss}, STEP._replace(steps=n_steps, wait_s=wait_s))
    log.write_validation(1, 4, {"val/score": 1.0}, "reading; try x", epoch_steps=epoch_steps)
    log.write_validation(2, 4, {"val/score": 1.0})  # as if resumed at the end of an epoch: no step is left
    printed = capsys.readouterr().out
    assert "epoch 1/2 train/loss 2.5, val/score 1, 10 fresh rows/s, " in printed
    advice = "(input-bound: reading; try x, or run `python diagnose.py` with the same arguments)"
    assert printed.count(advice) == is_bound
    assert "epoch 2/2 val/score 1\n" in printed


@pytest.mark.parametrize(
    ("settings", "begin"),
    [({"train.steps": 90}, "step 40/90 "), ({"train.validate_every_steps": 20}, "step 40 ")],
)
def test_log_validation_inside_an_epoch(board, capsys, settings, begin):
    log = board(**settings)
    for n_steps in (19, 20):  # too few to say that they are bound by their input; enough
        log.write(20, {"train/loss": 1.0}, STEP._replace(steps=n_steps, wait_s=0.9))
        log.write_validation(0, 40, {"val/score": 1.0}, epoch_steps=1000)
    lines = capsys.readouterr().out.splitlines()
    assert ["input-bound" in line for line in lines] == [False, True]
    assert all(line.startswith(f"{begin}train/loss 1, val/score 1, 10 fresh rows/s") for line in lines)


def test_log_bar_ends_at_the_last_step(board, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(tensorboard.sys, "stderr", terminal)
    with board(step=100) as log:
        for step in range(101, 301):
            log.count(step, (step - 0.5) / 300)
    assert "| 300/300 [" in terminal.getvalue().rpartition("\r")[2]
    assert "Warning" not in terminal.getvalue()  # that of tqdm, if the rows are more than planned


def test_log_wandb_refusal_is_one_line(board, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setattr(wandb, "init", Mock(side_effect=wandb.errors.UsageError("No API key configured.")))
    with pytest.raises(UserError, match=r"log.wandb is mine, but No API key configured.; use"):
        board(**{"log.wandb": "mine"})


@pytest.mark.slow
def test_log_wandb_has_the_points(board, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for points in (((5, 1.0), (10, 0.5)), ((15, 0.25),)):  # the run is resumed
        with board(**{"log.wandb": "mine", "optim.lr": 0.1, "data.fields": {"a": "b"}}) as log:
            for step, loss in points:
                log.write(step, {"train/loss": loss})
        wandb.finish()  # as at the end of the process
    first, second = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert first.name == second.name == f"run-{(tmp_path / 'wandb-id.txt').read_text()}.wandb"

    def logged() -> set[tuple[bytes, float]]:
        """Settings and scalars: messages of protobuf, in which JSON follows a name, a tag and a length."""
        content = first.read_bytes()
        found = re.finditer(rb"(optim.lr|train/loss)\x82\x01(.)", content, re.DOTALL)
        return {(each[1], float(content[each.end() : each.end() + each[2][0]])) for each in found}

    wait_until(lambda: len(logged()) >= 3)  # the process of wandb may write a little later
    assert logged() == {(b"optim.lr", 0.1), (b"train/loss", 1.0), (b"train/loss", 0.5)}
    assert all(name in first.read_bytes() for name in (b"mine", tmp_path.name.encode()))  # the project and the run


def test_log_writer_is_for_images_too(board, tmp_path):
    log = board()
    log.writer.add_image("examples", torch.zeros(3, 4, 4), 1)
    log.__exit__(None)
    assert events_in(tmp_path).Tags()["images"] == ["examples"]
    assert board(world=World(1, 1, 1, CPU)).writer is None


def test_log_thread_of_a_writer_that_fails_is_one_warning(board, monkeypatch, capsys):
    """Without inodes, for instance. Errors of other threads are shown."""
    others = []
    monkeypatch.setattr(threading, "excepthook", others.append)
    monkeypatch.setattr("tensorboard.summary.writer.record_writer.RecordWriter.write", FULL)
    with board() as log:
        log.write(1, {"train/loss": 1.0})
        thread = threading.Thread(target=Mock(side_effect=ZeroDivisionError))
        thread.start()
        thread.join()
    assert [args.exc_type for args in others] == [ZeroDivisionError]
    assert capsys.readouterr().out.count("training continues") == 1
