import json
import struct
import time
from pathlib import Path

import pytest
from harness import TIMEOUT_S
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fastgpu.process.launch import UserError
from fastgpu.telemetry import log as log_module
from fastgpu.telemetry.log import CHARTS, TensorBoard

CONFIG = {"optim.lr": 0.1, "data.fields": {"a": "b"}} | {f"model.option_{n}": n for n in range(120)}


def test_the_config_and_the_charts_are_shown_beside_the_scalars(tmp_path, monkeypatch):
    layouts = []
    monkeypatch.setattr(log_module.SummaryWriter, "add_custom_scalars", lambda _, layout: layouts.append(layout))
    board = TensorBoard(tmp_path, CONFIG, 0)
    board.scalars(5, {"train/loss": 1.0})
    board.close({"val/loss": 0.5})
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(5, 1.0)]
    assert "config/text_summary" in events.Tags()["tensors"]
    assert events.summary_metadata["_hparams_/experiment"].plugin_data.plugin_name == "hparams"
    assert layouts == [{"training": CHARTS}]


def test_a_writer_that_fails_warns_once_and_loses_its_points(tmp_path, monkeypatch, capsys):
    def refuse(*_, **__):
        raise RuntimeError("no answer")

    board = TensorBoard(tmp_path, {}, 0)
    with monkeypatch.context() as patch:
        patch.setattr(log_module.SummaryWriter, "add_scalar", refuse)
        board.scalars(1, {"x/y": 1.0})
        board.scalars(2, {"x/y": 1.0})
    board.scalars(3, {"x/y": 1.0})
    board.close({})
    assert capsys.readouterr().out == (
        "warning: cannot log to TensorBoard (RuntimeError: no answer); training goes on\n"
    )
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.step for event in events.Scalars("x/y")] == [3]


def test_a_disk_without_room_at_the_start_does_not_stop_the_run(tmp_path, monkeypatch, capsys):
    def refuse(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(log_module, "SummaryWriter", refuse)
    board = TensorBoard(tmp_path, {}, 0)
    board.scalars(1, {"x/y": 1.0})
    board.close({})
    assert capsys.readouterr().out.count("training goes on") == 1


def test_wandb_that_refuses_is_one_line(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")

    def refuse(**_):
        raise wandb.errors.UsageError("No API key configured.")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(UserError, match=r"log.wandb is mine, but No API key configured.; use"):
        TensorBoard(tmp_path, {"log.wandb": "mine"}, 0)


@pytest.mark.slow
def test_wandb_has_the_points(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    board = TensorBoard(tmp_path, CONFIG | {"log.wandb": "mine"}, 0)
    for step, loss in ((5, 1.0), (10, 0.5)):
        board.scalars(step, {"train/loss": loss})
    board.close({"val/top1_pct": 50.0})
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
