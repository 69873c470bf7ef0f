import errno
import json
import re
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fastgpu import log as log_module
from fastgpu.log import Log, gpu_state


def test_the_same_scalars_in_tensorboard_and_json_lines(tmp_path):
    log = Log(tmp_path, 100)
    for step in (1, 2, 3):
        log.scalars(step, {"train/loss": 1 / step, "data/wait_pct": 0.5})
    log.finish({"optim.lr": 0.1, "data.fields": {"a": "b"}, "train.compile": False}, {"val/loss": 0.25})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["train/loss"]) for line in lines] == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert all(line["time_s"] >= 0 for line in lines)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Tags()["scalars"] == ["train/loss", "data/wait_pct"]
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3]
    assert events.summary_metadata["_hparams_/experiment"].plugin_data.plugin_name == "hparams"


def test_without_a_folder_nothing_happens(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    log = Log(None, 100)
    log.scalars(1, {"x/y": 1.0})
    log.progress(1, "text", important=True)
    log.finish({}, {})
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().out == ""


def test_a_full_disk_warns_once_and_never_stops(tmp_path, monkeypatch, capsys):
    log = Log(tmp_path, 100)
    full = OSError(errno.ENOSPC, "No space left on device")

    def refuse(*_, **__):
        raise full

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        patch.setattr(log._writer, "add_scalar", refuse)
        for step in range(3):
            log.scalars(step, {"x/y": 1.0})
    log.scalars(9, {"x/y": 1.0})  # the disk has room again
    log.finish({}, {})
    assert len(re.findall("warning: cannot write logs", capsys.readouterr().out)) == 1
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["step"] == 9


def test_a_folder_that_vanishes_does_not_stop_a_run(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    log = Log(tmp_path / "run", 100)
    for path in (tmp_path / "run").iterdir():
        path.unlink()
    (tmp_path / "run").rmdir()
    log.scalars(1, {"x/y": 1.0})
    log.finish({}, {"x/y": 1.0})
    assert "training goes on" in capsys.readouterr().out


def test_where_there_is_no_terminal_lines_are_few(tmp_path, monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(log_module.time, "monotonic", lambda: now[0])
    log = Log(tmp_path, 100)
    for second in range(11):
        now[0] = second
        log.progress(second, f"second {second}")
    log.progress(11, "epoch over", important=True)
    assert capsys.readouterr().out.splitlines() == ["second 5", "second 10", "epoch over"]
    log.finish({}, {})


def test_no_gpu_gives_no_counter():
    assert gpu_state(torch.device("cpu")) == {}


@pytest.mark.parametrize("util", [None, 37])
def test_a_counter_that_is_missing_is_left_out(monkeypatch, util):
    def utilization(_):
        if util is None:
            raise ModuleNotFoundError("pynvml")
        return util

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 3 << 30)
    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    expected = {"gpu/mem_peak_gib": 3.0} | ({"gpu/util_pct": 37} if util else {})
    assert gpu_state(torch.device("cuda", 0)) == expected
