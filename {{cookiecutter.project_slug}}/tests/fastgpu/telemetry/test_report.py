import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from harness import ROOT

from fastgpu.telemetry.ceiling import FILE, feed_identity, step_identity
from fastgpu.telemetry.clock import Throughput
from fastgpu.telemetry.report import feed_verdict, read_config, read_metrics, summary, table, verdicts, write_report

VALUES = {
    "train/loss": 0.5,
    "data/wait_pct": 3.0,
    "data/fresh_rows_per_s": 12_345.6,
    "train/trained_rows_per_s": 24_691.2,
    "host/cpu_user_pct": 12.0,
    "gpu0/util_pct": 97.0,
    "gpu0/util_min_pct": 80.0,
    "gpu1/util_pct": 50.0,
    "gpu0/sm_active_pct": 61.0,
    "gpu0/power_w": 300.0,
}


def write_points(folder: Path, points: list[dict[str, float]]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(point) + "\n" for point in points))
    return folder


def write_run(folder: Path, n_points: int = 5) -> Path:
    """A run's folder. The values of its tags rise a little from each point to the next."""
    points = []
    for number in range(n_points):
        values = {tag: value * (1 + number / 1000) for tag, value in VALUES.items()}
        points.append({"step": number, "time_s": 10.0 * number} | values)
    points.append({"step": n_points, "time_s": 10.0 * n_points, "val/loss": 0.25, "val/top1_pct": 99.0})
    write_points(folder, points)
    (folder / "config.yaml").write_text("workload: images\ndata: {batch_size: 64}  # <b>&\nmodel: {width: 8}\n")
    (folder / "run.json").write_text("{}")
    return folder


def svgs(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page)]


# ---------------------------------------------------------------------------------------------- the summary


def test_means_of_a_run_are_sums_over_sums():
    """Rows per second times the time of a step is the batch size, however uneven the points are."""
    batch_size = 64
    intervals = [
        Throughput(seconds=9.0, wait_s=8.0, fresh_rows=32 * 5, trained_rows=64 * 5, steps=5),  # the start: left out
        Throughput(seconds=0.5, wait_s=0.0, fresh_rows=64 * 50, trained_rows=64 * 50, steps=50),
        Throughput(seconds=20.0, wait_s=5.0, fresh_rows=32 * 40, trained_rows=64 * 40, steps=40),
        Throughput(seconds=0.1, wait_s=0.1, fresh_rows=16 * 1, trained_rows=64 * 1, steps=1),
    ]
    energies = [1.0, 2.0, 30.0, 4.0]
    points = []
    for interval, energy in zip(intervals, energies, strict=True):
        of_gpu = {"gpu0/energy_j_per_1000_rows": energy, "gpu0/util_min_pct": energy, "gpu0/mem_peak_gib": energy}
        points.append({"step": 1, "time_s": 1.0} | interval._asdict() | interval.scalars() | of_gpu)

    values = {row.title: row.value for row in summary(points)}
    seconds = 0.5 + 20.0 + 0.1
    fresh_rows = 64 * 50 + 32 * 40 + 16
    trained_rows = 64 * (50 + 40 + 1)
    assert values["fresh rows"] == pytest.approx(fresh_rows / seconds)
    assert values["trained rows"] == pytest.approx(trained_rows / seconds)
    assert values["data wait"] == pytest.approx(100 * 5.1 / seconds)
    assert values["step"] == pytest.approx(1000 * seconds / 91)
    assert values["trained rows"] * values["step"] / 1000 == pytest.approx(batch_size)
    assert values["GPU energy, gpu0"] == pytest.approx((2 * 64 * 50 + 30 * 64 * 40 + 4 * 64) / trained_rows)
    assert values["GPU-Util, minimum, gpu0"] == 2
    assert values["GPU memory, peak of tensors, gpu0"] == 30


def test_the_summary_has_every_gpu_and_the_last_validation(tmp_path):
    points = read_metrics(write_run(tmp_path))
    rows = {row.title: (row.value, row.unit) for row in summary(points)}
    assert rows["fresh rows"] == (pytest.approx(12_345.6 * 1.0025), "rows/s")  # of the last four of five points
    assert rows["GPU-Util, gpu0"] == (pytest.approx(97 * 1.0025), "% of the time")
    assert rows["GPU-Util, gpu1"] == (pytest.approx(50 * 1.0025), "% of the time")
    assert rows["validation top1_pct"] == (99, "")
    assert rows["validation loss"] == (0.25, "")
    assert "CPU, system" not in rows  # not measured, so not there
    lines = table(points).splitlines()
    assert len(lines) == len(rows)
    assert re.fullmatch(r"  fresh rows +12,376 rows/s", next(line for line in lines if "fresh" in line))
    assert re.fullmatch(r"  data wait +3\.01 % of the time", next(line for line in lines if "wait" in line))


def test_other_machines_are_named():
    points = [{"step": 1, "time_s": 1.0, "machine1/gpu0/util_pct": 90.0, "machine1/host/cpu_user_pct": 5.0}]
    assert [row.title for row in summary(points)] == ["GPU-Util, machine1/gpu0", "CPU, user, machine1"]


# ---------------------------------------------------------------------------------------------- verdicts


@pytest.mark.parametrize(
    ("wait_pct", "util_pct", "verdict"),
    [
        (75, None, "input-bound: 75 % of the time was spent waiting for data; run `python diagnose.py`"),
        (75, 10, "input-bound: 75 % of the time was spent waiting for data; run `python diagnose.py`"),
        (0.2, 40, "fed, but the GPU was idle 60 % of the time; `python diagnose.py` tells why"),
        (0.2, 97, "fed: 0.2 % of the time was spent waiting for data"),
        (0.2, None, "fed: 0.2 % of the time was spent waiting for data"),
    ],
)
def test_a_verdict_in_one_line(wait_pct, util_pct, verdict):
    assert feed_verdict(wait_pct, util_pct) == verdict


def test_the_verdict_of_diagnose_is_shown_to_a_run_with_its_settings(tmp_path):
    folder = write_run(tmp_path / "a")
    config = read_config(folder)
    diagnosis = {"is_conclusive": True, "summary": "READ: the storage is slow"}
    for name, identity in (("step", step_identity(config)), ("feed", feed_identity(config))):
        diagnosis[name] = identity
    (tmp_path / FILE).write_text(json.dumps(diagnosis))
    assert verdicts(folder, read_metrics(folder)) == [feed_verdict(3.0, 97.0), "READ: the storage is slow"]
    write_report(folder)
    assert "READ: the storage is slow" in (folder / "report.html").read_text()
    (folder / "config-2.yaml").write_text("workload: images\ndata: {batch_size: 32}\nmodel: {width: 8}\n")
    assert verdicts(folder, read_metrics(folder)) == [feed_verdict(3.0, 97.0)]


def test_the_newest_config_counts(tmp_path):
    for number in ("", "-2", "-10"):
        (tmp_path / f"config{number}.yaml").write_text(f"workload: images\ndata: {{fields: {{a: 'b{number}'}}}}\n")
    assert read_config(tmp_path) == {"workload": "images", "data.fields": {"a": "b-10"}}
    (tmp_path / "config-10.yaml").write_text("{")
    assert read_config(tmp_path) == {}
    assert read_config(tmp_path / "none") == {}


# ---------------------------------------------------------------------------------------------- the page


def test_the_page_is_one_file_with_every_chart_and_no_network(tmp_path):
    folder = write_run(tmp_path / "a <b> run")
    write_report(folder)
    page = (folder / "report.html").read_text()
    assert not re.search(r"https?://|<script|<link|src=", page)
    assert "a &lt;b&gt; run" in page
    assert "<b>" not in page
    titles = re.findall("<h2>(.*?)</h2>", page)
    assert titles == [
        "data wait and GPU activity, %",
        "rows per second",
        "loss",
        "GPU power, W",
        "CPU, % of all CPUs",
    ]
    charts = dict(zip(titles, svgs(page), strict=True))
    assert [len(chart.findall("polyline")) for chart in charts.values()] == [5, 2, 2, 1, 1]
    for chart in charts.values():
        for line in chart.findall("polyline"):
            points = [tuple(map(float, point.split(","))) for point in line.get("points").split()]
            assert all(70 <= x <= 860 and 10 <= y <= 176 for x, y in points)
            assert all(before[0] < after[0] for before, after in pairwise(points))


def test_long_runs_are_thinned_out_and_keep_their_ends(tmp_path):
    write_report(write_run(tmp_path, 5000))
    charts = svgs((tmp_path / "report.html").read_text())
    points = charts[0].find("polyline").get("points").split()
    assert 300 < len(points) <= 600
    assert points[-1].startswith("860.0,")


@pytest.mark.parametrize("n_points", [0, 1])
def test_short_runs_have_a_page(tmp_path, n_points):
    write_report(write_run(tmp_path, n_points))
    assert svgs((tmp_path / "report.html").read_text())


def test_a_run_without_points_or_with_a_cut_line_is_no_error(tmp_path):
    write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()
    assert table([]) == ""
    assert verdicts(tmp_path, []) == []
    path = write_run(tmp_path) / "metrics.jsonl"
    path.write_text(path.read_text()[:-20])
    assert len(read_metrics(tmp_path)) == 5


def test_a_page_that_cannot_be_written_is_reported(tmp_path, monkeypatch, capsys):
    def refuse(*_, **__):
        raise OSError(28, "No space left on device")

    write_run(tmp_path)
    monkeypatch.setattr(Path, "write_text", refuse)
    write_report(tmp_path)
    assert "warning: cannot write" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("end", ["raise ValueError('a bug')", "raise SystemExit(2)", "log.finish({}, {})"])
def test_however_a_run_ends_there_is_a_page(tmp_path, end):
    script = f"""
from pathlib import Path
from fastgpu.telemetry.log import Log
log = Log(Path({str(tmp_path)!r}), planned_rows=100)
log.scalars(1, {{"train/loss": 0.5, "data/wait_pct": 1.0}})
{end}
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, check=False)
    assert "<polyline" in (tmp_path / "report.html").read_text()


def test_the_command_writes_the_page_of_a_run_that_was_killed(tmp_path):
    command = [sys.executable, "-m", "fastgpu.telemetry.report", str(write_run(tmp_path / "a"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "<polyline" in (tmp_path / "a" / "report.html").read_text()
