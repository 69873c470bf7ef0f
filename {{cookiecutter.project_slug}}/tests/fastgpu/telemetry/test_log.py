import errno
import json
import re
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_monitor import GPU_TAGS, HOST_TAGS

from fastgpu.telemetry import log as log_module
from fastgpu.telemetry.clock import Throughput
from fastgpu.telemetry.log import Log


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
    log._writer.flush()  # its thread opens the file
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


def test_every_custom_chart_names_tags_that_there_are():
    known = {f"gpu0/{name}" for name in GPU_TAGS} | {f"host/{name}" for name in HOST_TAGS}
    known |= set(Throughput(1, 1, 1, 1).scalars())
    for page in log_module.LAYOUT.values():
        for kind, patterns in page.values():
            assert kind == "Multiline"
            for pattern in patterns:
                assert any(re.fullmatch(pattern, tag) for tag in known), pattern


def test_charts_that_have_nothing_to_show_are_left_out(tmp_path, monkeypatch):
    laid = []
    log = Log(tmp_path, 100)
    monkeypatch.setattr(log._writer, "add_custom_scalars", laid.append)
    for tags in (["data/wait_pct"], ["data/wait_pct"], ["gpu1/power_w", "train/loss"]):
        log.scalars(1, dict.fromkeys(tags, 1.0))
    charts = [[chart for page in pages.values() for chart in page] for pages in laid]
    first = "GPU-Util, SM activity, data wait"
    assert charts == [[first], [first, "GPU clocks and power"]]
    log.finish({}, {})


def test_a_run_that_waits_is_told_once(tmp_path, capsys):
    log = Log(tmp_path, 100)
    for step, wait in enumerate([100, 40, 42, 41, 41, 90, 90]):  # the first is the start's
        log.scalars(step, {"data/wait_pct": float(wait)})
    log.finish({}, {})
    assert capsys.readouterr().out.count("warning: input-bound: 41 % of the time waits for data") == 1
    log = Log(tmp_path, 100)
    for step, wait in enumerate([100, 0, 20, 3, 2, 90, 90]):
        log.scalars(step, {"data/wait_pct": float(wait)})
    log.finish({}, {})
    assert "input-bound" not in capsys.readouterr().out
