import errno
import io
import json
import re
import threading
import time
from itertools import pairwise

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fastgpu.report.results import read_metrics
from fastgpu.telemetry import log as log_module
from fastgpu.telemetry.clock import Throughput
from fastgpu.telemetry.log import Log


def test_the_same_scalars_in_tensorboard_and_json_lines(tmp_path):
    config = {"optim.lr": 0.1, "data.fields": {"a": "b"}, "train.compile": False}
    log = Log(tmp_path, planned_rows=100, config=config)
    for step in (1, 2, 3):
        log.scalars(step, {"train/loss": 1 / step, "data/wait_pct": 0.5})
    log.finish({"val/loss": 0.25})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["train/loss"]) for line in lines] == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert all(line["time_s"] >= 0 for line in lines)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Tags()["scalars"] == ["train/loss", "data/wait_pct"]
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3]
    assert events.summary_metadata["_hparams_/experiment"].plugin_data.plugin_name == "hparams"


def test_a_point_holds_the_sums_of_its_interval(tmp_path):
    log = Log(tmp_path, planned_rows=100)
    interval = Throughput(seconds=2.0, wait_s=1.0, fresh_rows=3.0, trained_rows=6.0, steps=4)
    log.scalars(4, interval.scalars(), interval)
    log.finish({})
    point = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert Throughput(*(point[name] for name in Throughput._fields)) == interval
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(interval.scalars())  # the sums are in the JSON lines only


def test_the_time_of_a_resumed_run_goes_on(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 7, "time_s": 100.0, "x/y": 1.0}\n')
    log = Log(tmp_path, planned_rows=100)
    log.scalars(8, {"x/y": 1.0})
    log.finish({})
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["time_s"] >= 100


def test_without_a_folder_nothing_happens(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    log = Log(None, planned_rows=100)
    log.scalars(1, {"x/y": 1.0})
    log.progress(1, "text", important=True)
    log.finish({})
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().out == ""


def test_points_that_a_resumed_run_trains_again_count_once(tmp_path):
    """A run is killed at step 30, resumed from a checkpoint at step 20, and killed and resumed there again."""
    log = Log(tmp_path, planned_rows=100)
    for step in (10, 20, 30):
        log.scalars(step, {"train/loss": 1.0}, Throughput(seconds=1.0, steps=10))
    log.finish({})
    for loss in (2.0, 3.0):
        time.sleep(1.1)  # TensorBoard orders files by the second in their names
        log = Log(tmp_path, planned_rows=100, step=20)
        for step in (25, 30, 35):
            log.scalars(step, {"train/loss": loss}, Throughput(seconds=1.0, steps=5))
        log.finish({})
    points = read_metrics(tmp_path)
    assert [(p["step"], p["train/loss"]) for p in points] == [(10, 1), (20, 1), (25, 3), (30, 3), (35, 3)]
    assert [point["part"] for point in points] == [1, 1, 3, 3, 3]
    assert all(before["time_s"] <= after["time_s"] for before, after in pairwise(points))
    events = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(10, 1), (20, 1), (25, 3), (30, 3), (35, 3)]


def test_a_full_disk_warns_once_and_never_stops(tmp_path, monkeypatch, capsys):
    log = Log(tmp_path, planned_rows=100)

    def refuse(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(log_module, "open_own", refuse)
        for step in range(3):
            log.scalars(step, {"x/y": 1.0})
    log.scalars(9, {"x/y": 1.0})  # the disk has room again
    log.finish({})
    assert len(re.findall("warning: cannot write logs", capsys.readouterr().out)) == 1
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["step"] == 9


def test_a_folder_that_vanishes_does_not_stop_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # TensorBoard's own thread ends with a traceback
    (tmp_path / "run").mkdir()
    log = Log(tmp_path / "run", planned_rows=100)
    log.scalars(1, {"x/y": 1.0})
    (tmp_path / "run").rename(tmp_path / "gone")  # in one step: TensorBoard's thread may be writing into it
    log.scalars(1, {"x/y": 1.0})
    log.finish({"x/y": 1.0})
    assert "training goes on" in capsys.readouterr().out


def test_where_there_is_no_terminal_lines_are_few(tmp_path, monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(log_module.time, "monotonic", lambda: now[0])
    log = Log(tmp_path, planned_rows=100)
    for second in range(11):
        now[0] = second
        log.progress(second, f"second {second}")
    log.progress(11, "epoch over", important=True)
    assert capsys.readouterr().out.splitlines() == ["second 5", "second 10", "epoch over"]
    log.finish({})


class Terminal(io.StringIO):
    """A terminal that remembers what was drawn."""

    def isatty(self):
        return True


@pytest.mark.parametrize("rows_per_step", [64, 64 / 3])
def test_the_bar_moves_every_second_between_two_reports(tmp_path, monkeypatch, rows_per_step):
    terminal = Terminal()
    monkeypatch.setattr(log_module.sys, "stderr", terminal)
    now = [1000.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    log = Log(tmp_path, planned_rows=round(300 * rows_per_step))
    for step in range(1, 301):  # thirty seconds without a report
        now[0] += 0.1
        log.count(rows_per_step)
        assert log._bar.last_print_n >= round((step - 11) * rows_per_step)
    assert 29 <= len(re.findall(r"\d+%\|", terminal.getvalue())) <= 31
    assert log._bar.n == log._bar.total
    log.progress(round(150 * rows_per_step), "loss 0.5")  # what the loop says is right
    assert log._bar.n == log._bar.total / 2
    assert "Warning" not in terminal.getvalue()  # that of tqdm, if the rows are more than planned
    log.finish({})


def test_an_input_bound_run_is_told_so_once(tmp_path, capsys):
    log = Log(tmp_path, planned_rows=100)
    for step, wait in enumerate([100, 40, 42, 41, 41, 90, 90]):  # the first is the start's
        log.scalars(step, {"data/wait_pct": float(wait)})
    log.finish({})
    assert capsys.readouterr().out.count("warning: input-bound: 41 % of the time was spent waiting for data") == 1
    log = Log(tmp_path, planned_rows=100)
    for step, wait in enumerate([100, 0, 20, 3, 2, 90, 90]):
        log.scalars(step, {"data/wait_pct": float(wait)})
    log.finish({})
    assert "input-bound" not in capsys.readouterr().out


class Clock:
    """`time.monotonic` that moves only when it is told to."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(log_module, "time", clock)
    return clock


def test_the_rest_takes_as_long_a_row_as_since_this_process_began(tmp_path, clock, capsys):
    log = Log(tmp_path, planned_rows=1000, consumed_rows=400)
    assert log.estimate_left_s() == 0  # nothing is known yet
    log.count(100)
    clock.now = 30.0  # validation counts as well
    assert log.estimate_left_s() == 150
    log.progress(500, "epoch 1/2", important=True)
    log.count(500 + 1e-9)  # parts of echoed rows add up with rounding
    log.progress(1000 + 1e-9, "epoch 2/2", important=True)
    assert capsys.readouterr().out == "epoch 1/2, 02:30 left\nepoch 2/2\n"
    log.finish({})


@pytest.mark.parametrize(("rows", "hint"), [(100, "about 18 min are left on this CPU; "), (800, "")])
def test_a_long_run_on_a_cpu_says_so_once(tmp_path, clock, capsys, rows, hint):
    log = Log(tmp_path, planned_rows=1000)
    log.count(1)
    clock.now = 9.0
    log.hint_at_slow_cpu()  # too early for an estimate
    log.count(rows - 1)
    clock.now = 120.0
    log.hint_at_slow_cpu()
    log.hint_at_slow_cpu()
    printed = capsys.readouterr().out
    assert printed.startswith(hint)
    assert len(printed.splitlines()) == bool(hint)
    log.finish({})
