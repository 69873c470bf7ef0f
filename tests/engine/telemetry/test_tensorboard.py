import errno
import io
import json
import re
import struct
import threading
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness import ALONE, CPU, TIMEOUT_S
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fastgpu.process.launch import UserError
from fastgpu.process.world import World
from fastgpu.report.results import read_run
from fastgpu.telemetry import tensorboard
from fastgpu.telemetry.clock import Throughput
from fastgpu.telemetry.tensorboard import CHARTS, TensorBoard

CONFIG = {"optim.lr": 0.1, "data.fields": {"a": "b"}} | {f"model.option_{n}": n for n in range(120)}
STEP = Throughput(seconds=1.0, wait_s=0.1, fresh_rows=10.0, trained_rows=10.0, steps=5)


def board(
    folder: Path,
    *,
    planned_rows: int = 100,
    row: int = 0,
    step: int = 0,
    config: dict[str, Any] | None = None,
    world: World = ALONE,
) -> TensorBoard:
    """The log of a run that begins at this row and step."""
    run = SimpleNamespace(folder=folder, config={"log.wandb": "", **(config or {})}, first_row=row, first_step=step)
    return TensorBoard(run, planned_rows, world)


class Other(World):
    """A rank that is not the first one."""

    is_main = False

    def all_gather(self, value: float) -> list[float]:
        return [value]


def waited(pct: float) -> Throughput:
    return STEP._replace(wait_s=pct / 100)


def test_the_same_scalars_in_tensorboard_and_json_lines(tmp_path):
    config = {"optim.lr": 0.1, "data.fields": {"a": "b"}, "train.compile": False}
    log = board(tmp_path, planned_rows=100, config=config)
    for step in (1, 2, 3):
        log.write(step, {"train/loss": 1 / step, "data/wait_pct": 0.5})
    log.__exit__(None)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["train/loss"]) for line in lines] == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert all(line["time_s"] >= 0 for line in lines)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Tags()["scalars"] == ["train/loss", "data/wait_pct"]
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3]
    assert events.summary_metadata["_hparams_/experiment"].plugin_data.plugin_name == "hparams"


def test_a_point_holds_the_sums_of_its_interval(tmp_path):
    log = board(tmp_path, planned_rows=100)
    interval = Throughput(seconds=2.0, wait_s=1.0, fresh_rows=3.0, trained_rows=6.0, steps=4)
    log.write(4, {"train/loss": 0.5}, interval)
    log.__exit__(None)
    point = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert Throughput(*(point[name] for name in Throughput._fields)) == interval
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"train/loss", *interval.scalars()}  # the sums are in the JSON lines only


def test_the_time_of_a_resumed_run_goes_on(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 7, "time_s": 100.0, "x/y": 1.0}\n')
    log = board(tmp_path, planned_rows=100)
    log.write(8, {"x/y": 1.0})
    log.__exit__(None)
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["time_s"] >= 100


def test_without_a_folder_nothing_happens(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    log = board(tmp_path, world=Other(1, 1, 1, CPU))
    log.write(1, {"x/y": 1.0})
    log.end_epoch("1/2", 1, {"val/x": 1.0})
    log.__exit__(None)
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().out == ""


def test_points_that_a_resumed_run_trains_again_count_once(tmp_path):
    """A run is killed at step 30, resumed from a checkpoint at step 20, and killed and resumed there again."""
    log = board(tmp_path, planned_rows=100)
    for step in (10, 20, 30):
        log.write(step, {"train/loss": 1.0}, STEP)
    log.__exit__(None)
    for loss in (2.0, 3.0):
        time.sleep(1.1)  # TensorBoard orders files by the second in their names
        log = board(tmp_path, planned_rows=100, step=20)
        for step in (25, 30, 35):
            log.write(step, {"train/loss": loss}, STEP)
        log.__exit__(None)
    points = read_run(tmp_path).points
    assert [(p["step"], p["train/loss"]) for p in points] == [(10, 1), (20, 1), (25, 3), (30, 3), (35, 3)]
    assert [point["part"] for point in points] == [1, 1, 3, 3, 3]
    assert all(before["time_s"] <= after["time_s"] for before, after in pairwise(points))
    events = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(10, 1), (20, 1), (25, 3), (30, 3), (35, 3)]


def test_a_full_disk_warns_once_and_never_stops(tmp_path, monkeypatch, capsys):
    log = board(tmp_path)

    def refuse(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(tensorboard, "open_to_append", refuse)
        patch.setattr(tensorboard.SummaryWriter, "add_scalar", refuse)
        for step in range(3):
            log.write(step, {"x/y": 1.0})
    log.write(9, {"x/y": 1.0})  # the disk has room again
    log.__exit__(None)
    assert len(re.findall("warning: cannot log to .*; training goes on", capsys.readouterr().out)) == 1
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["step"] == 9
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.step for event in events.Scalars("x/y")] == [9]


def test_a_folder_that_vanishes_does_not_stop_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # TensorBoard's own thread ends with a traceback
    (tmp_path / "run").mkdir()
    log = board(tmp_path / "run", planned_rows=100)
    log.write(1, {"x/y": 1.0})
    (tmp_path / "run").rename(tmp_path / "gone")  # in one step: TensorBoard's thread may be writing into it
    log.write(1, {"x/y": 1.0})
    log.__exit__(None)
    assert "training goes on" in capsys.readouterr().out


def test_where_there_is_no_terminal_lines_are_few(tmp_path, monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(tensorboard.time, "monotonic", lambda: now[0])
    log = board(tmp_path)
    for second in range(11):
        now[0] = second
        log.write(second, {"train/loss": 1.0}, STEP)
    log.end_epoch("1/2", 11, {"val/x": 1.0})
    assert [line.split(":")[0].split(" train")[0] for line in capsys.readouterr().out.splitlines()] == [
        "step 5",
        "step 10",
        "epoch 1/2",
    ]
    log.__exit__(None)


def test_the_line_of_an_epoch_has_the_mean_loss_of_its_steps(tmp_path, capsys):
    log = board(tmp_path)
    for n_steps, loss in ((1, 4.0), (3, 2.0)):  # two reports of unequal length
        log.write(n_steps, {"train/loss": loss}, STEP._replace(steps=n_steps))
    log.end_epoch("1/2", 4, {"val/score": 1.0})
    log.end_epoch("2/2", 4, {"val/score": 1.0})  # as if resumed at the end of an epoch: no step is left
    printed = capsys.readouterr().out
    assert "epoch 1/2 train/loss 2.5, val/score 1, 10 fresh rows/s, " in printed
    assert "epoch 2/2 val/score 1, no rows" in printed
    log.__exit__(None)


class Terminal(io.StringIO):
    """A terminal that remembers what was drawn."""

    def isatty(self):
        return True


@pytest.mark.parametrize("rows_per_step", [64, 64 / 3])
def test_the_bar_moves_every_second_between_two_reports(tmp_path, monkeypatch, rows_per_step):
    terminal = Terminal()
    monkeypatch.setattr(tensorboard.sys, "stderr", terminal)
    now = [1000.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    log = board(tmp_path, planned_rows=round(300 * rows_per_step))
    for step in range(1, 301):  # thirty seconds without a report
        now[0] += 0.1
        log.count(rows_per_step)
        assert log._bar.last_print_n >= round((step - 11) * rows_per_step)
    assert 29 <= len(re.findall(r"\d+%\|", terminal.getvalue())) <= 31
    assert log._bar.n == log._bar.total
    assert "Warning" not in terminal.getvalue()  # that of tqdm, if the rows are more than planned
    log.__exit__(None)


def test_an_input_bound_run_is_told_so_once(tmp_path, capsys):
    log = board(tmp_path)
    for step, wait in enumerate([100, 40, 42, 41, 41, 90, 90]):  # the first is the start's
        log.write(step, {"train/loss": 1.0}, waited(wait))
    log.__exit__(None)
    assert capsys.readouterr().out.count("warning: input-bound: 41 % of the time was spent waiting for data") == 1
    log = board(tmp_path)
    for step, wait in enumerate([100, 0, 20, 3, 2, 90, 90]):
        log.write(step, {"train/loss": 1.0}, waited(wait))
    log.__exit__(None)
    assert "input-bound" not in capsys.readouterr().out


class Clock:
    """`time.monotonic` that moves only when it is told to."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(tensorboard, "time", clock)
    return clock


def test_the_rest_takes_as_long_a_row_as_since_this_process_began(tmp_path, clock, capsys):
    log = board(tmp_path, planned_rows=1000, row=400)
    assert log.estimate_left_s() == 0  # nothing is known yet
    log.count(100)
    clock.now = 30.0  # validation counts as well
    assert log.estimate_left_s() == 150
    log.end_epoch("1/2", 5, {"val/x": 1.0})
    log.count(500 + 1e-9)  # parts of echoed rows add up with rounding
    log.end_epoch("2/2", 10, {"val/x": 1.0})
    assert capsys.readouterr().out == "epoch 1/2 val/x 1, no rows, 02:30 left\nepoch 2/2 val/x 1, no rows\n"
    log.__exit__(None)


def test_the_config_and_the_charts_are_shown_beside_the_scalars(tmp_path, monkeypatch):
    layouts = []
    monkeypatch.setattr(tensorboard.SummaryWriter, "add_custom_scalars", lambda _, layout: layouts.append(layout))
    log = board(tmp_path, config=CONFIG)
    log.write(5, {"train/loss": 1.0})
    log.write(5, {"val/loss": 0.5})
    log.__exit__(None)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(5, 1.0)]
    assert "config/text_summary" in events.Tags()["tensors"]
    assert events.summary_metadata["_hparams_/experiment"].plugin_data.plugin_name == "hparams"
    assert layouts == [{"training": CHARTS}]


def test_a_disk_without_room_at_the_start_does_not_stop_the_run(tmp_path, monkeypatch, capsys):
    def refuse(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensorboard, "SummaryWriter", refuse)
    log = board(tmp_path)
    log.write(1, {"x/y": 1.0})
    log.__exit__(None)
    assert capsys.readouterr().out.count("training goes on") == 1


def test_wandb_that_refuses_is_one_line(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")

    def refuse(**_):
        raise wandb.errors.UsageError("No API key configured.")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(UserError, match=r"log.wandb is mine, but No API key configured.; use"):
        board(tmp_path, config={"log.wandb": "mine"})


@pytest.mark.slow
def test_wandb_has_the_points(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    log = board(tmp_path, config=CONFIG | {"log.wandb": "mine"})
    for step, loss in ((5, 1.0), (10, 0.5)):
        log.write(step, {"train/loss": loss})
    log.__exit__(None)
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    deadline = time.monotonic() + TIMEOUT_S  # the process of wandb may write a little later
    losses: list[float] = []
    while len(losses) < 2 and time.monotonic() < deadline:
        records = read_wandb(path)
        items = [item for record in records if record.HasField("history") for item in record.history.item]
        losses = [
            json.loads(item.value_json) for item in items if "train/loss" in (item.key, "/".join(item.nested_key))
        ]
    assert losses == [1.0, 0.5]
    (run,) = {(record.run.project, record.run.run_group) for record in records if record.HasField("run")}
    assert run == ("mine", tmp_path.name)
    config = {item.key: json.loads(item.value_json) for r in records for item in r.run.config.update}
    assert config["optim.lr"] == 0.1


def read_wandb(path: Path) -> list:
    """The records of a local file of wandb: a log in the format of LevelDB (github.com/google/leveldb, log_format.md)
    behind a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    records = []
    parts = b""
    position = 7
    while position < len(data):
        left_in_block = 2**15 - position % 2**15
        if left_in_block < 7:
            position += left_in_block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            records.append(Record.FromString(parts))
            parts = b""
    return records
