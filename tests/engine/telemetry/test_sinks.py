import json
import math
import struct
import threading
import time
from pathlib import Path

import pytest
from harness import TIMEOUT_S
from pydantic import ValidationError
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fastgpu.process import config as config_module
from fastgpu.process.config import Log
from fastgpu.telemetry import sinks as sinks_module
from fastgpu.telemetry.sinks import MAX_FAILURES, Sinks
from fastgpu.telemetry.tags import FED, LOSS, METRICS_PCT

CONFIG = {"optim.lr": 0.1, "data.fields": {"a": "b"}} | {f"model.option_{n}": n for n in range(120)}
POINTS = {5: {"train/loss": 1.0, "val/top1_pct": 50.0}, 10: {"train/loss": 0.5}}


def log_points(name: str, folder: Path, points: dict[int, dict[str, float]] = POINTS, step: int = 0) -> None:
    folder.mkdir(exist_ok=True)
    sinks = Sinks([name], folder, CONFIG, step)
    for at, values in points.items():
        sinks.scalars(at, values)
    sinks.close({"val/top1_pct": 50.0}, "fed")


# ---------------------------------------------------------------------------------------------- any sink


class Failing:
    """A sink whose server answers some calls only."""

    def __init__(self, folder, config, step):
        self.taken = []
        self.n_calls = 0
        self.closed_by = None
        Failing.last = self

    def scalars(self, step, values):
        self.n_calls += 1
        if math.isnan(values["x/y"]):
            raise RuntimeError("no answer")
        self.taken.append(step)

    def close(self, metrics, verdict):
        self.closed_by = verdict


@pytest.fixture
def failing(monkeypatch) -> type[Failing]:
    monkeypatch.setitem(sinks_module.KINDS, "mlflow", Failing)
    return Failing


def test_a_sink_that_fails_loses_a_point_and_warns_once(tmp_path, failing, capsys):
    sinks = Sinks(["mlflow"], tmp_path, {}, 0)
    for step, value in enumerate([1.0, math.nan, 1.0, math.nan, 1.0]):
        sinks.scalars(step, {"x/y": value})
    sinks.close({}, "fed")
    assert failing.last.taken == [0, 2, 4]
    assert failing.last.closed_by == "fed"
    printed = capsys.readouterr().out
    assert printed == "warning: cannot log to mlflow (RuntimeError: no answer); training goes on\n"


def test_a_sink_that_always_fails_is_left_alone(tmp_path, failing):
    sinks = Sinks(["mlflow", "tensorboard"], tmp_path, {}, 0)
    for step in range(10):
        sinks.scalars(step, {"x/y": math.nan})
    sinks.close({}, "fed")
    assert failing.last.n_calls == MAX_FAILURES
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert len(events.Scalars("x/y")) == 10  # the others are asked as before


def test_a_sink_that_does_not_start_does_not_stop_the_run(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise RuntimeError("not logged in")

    monkeypatch.setitem(sinks_module.KINDS, "wandb", refuse)
    log_points("wandb", tmp_path)
    assert "cannot log to wandb (RuntimeError: not logged in); training goes on" in capsys.readouterr().out


def test_the_loop_does_not_wait_for_a_slow_sink(tmp_path, failing, monkeypatch):
    answers = threading.Event()
    monkeypatch.setattr(failing, "scalars", lambda *_: answers.wait(60))
    sinks = Sinks(["mlflow"], tmp_path, {}, 0)
    sinks.scalars(1, {})
    sinks.scalars(2, {})  # reached while the sink has not answered to the first
    answers.set()
    sinks.close({}, "fed")


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_a_mistake_in_the_config(name, monkeypatch, tmp_path):
    monkeypatch.setattr(config_module, "find_spec", lambda _: None)
    with pytest.raises(ValidationError, match=rf'installed packages only; run: pip install -e "\.\[{name}\]"'):
        Log(to=[name])
    monkeypatch.undo()
    (tmp_path / "no_such_package").mkdir()  # wandb makes a folder of its name, which Python takes for a package
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(
        config_module, "find_spec", lambda _: __import__("importlib.util").util.find_spec("no_such_package")
    )
    with pytest.raises(ValidationError, match="installed packages only"):
        Log(to=[name])


# ---------------------------------------------------------------------------------------------- the real packages


def test_tensorboard_draws_the_charts_that_have_something_to_show(tmp_path, monkeypatch):
    layouts = []
    monkeypatch.setattr(sinks_module.SummaryWriter, "add_custom_scalars", lambda _, layout: layouts.append(layout))
    values = [{"data/wait_pct": 1.0}, {"data/wait_pct": 2.0}, {"val/top1_pct": 1.0, "train/loss": 1.0}]
    log_points("tensorboard", tmp_path, dict(enumerate(values)))
    assert [list(layout["training"]) for layout in layouts] == [[FED], [FED, LOSS, METRICS_PCT]]
    assert layouts[1]["training"][METRICS_PCT] == ["Multiline", ["^val/top1_pct$"]]


def test_mlflow_has_the_points_and_goes_on_with_its_run(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/store")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    log_points("mlflow", tmp_path / "a")
    log_points("mlflow", tmp_path / "a", {15: {"train/loss": 0.25}}, step=10)
    (run,) = mlflow.search_runs(output_format="list")
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "train/loss")
    assert [(each.step, each.value) for each in history] == [(5, 1.0), (10, 0.5), (15, 0.25)]
    assert (run.info.run_name, run.info.status) == ("a", "FINISHED")
    assert run.data.params == {key: str(value) for key, value in CONFIG.items()}
    assert run.data.tags["verdict"] == "fed"


def test_a_run_that_broke_off_is_marked_in_mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/store")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    Sinks(["mlflow"], tmp_path, {}, 0).close(None, "")
    (run,) = mlflow.search_runs(output_format="list")
    assert run.info.status == "FAILED"


@pytest.mark.slow
def test_wandb_has_the_points_and_goes_on_with_its_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    log_points("wandb", tmp_path / "a")
    (tmp_path / "a/wandb").rename(tmp_path / "a/1")  # wandb names files by the second: they could get the same name
    log_points("wandb", tmp_path / "a", {15: {"train/loss": 0.25}}, step=10)
    files = [next(tmp_path.glob(f"a/{part}/offline-run-*/run-*.wandb")) for part in ("1", "wandb")]
    deadline = time.monotonic() + TIMEOUT_S  # the process of wandb may write a little later
    records = []
    while sum(record.HasField("history") for record in records) < 3 and time.monotonic() < deadline:
        records = [record for path in files for record in read_wandb(path)]
    assert {record.run.run_id for record in records if record.HasField("run")} == {
        (tmp_path / "a/wandb-id.txt").read_text()
    }
    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    assert [(row["step"], row["train/loss"]) for row in rows] == [(5, 1.0), (10, 0.5), (15, 0.25)]
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
