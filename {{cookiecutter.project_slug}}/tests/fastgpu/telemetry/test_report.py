import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from harness import ROOT

from fastgpu.telemetry.report import lines_of, read_metrics, summary, table, write_report

POINT = {
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


def run(folder: Path, points: int = 5, **more: float) -> Path:
    """A run's folder with so many points; the values of tags rise a little from each to the next."""
    lines = [
        {"step": n, "time_s": 10.0 * n} | {tag: value * (1 + n / 1000) for tag, value in (POINT | more).items()}
        for n in range(points)
    ]
    lines.append({"step": points, "time_s": 10.0 * points, "val/loss": 0.25, "val/top1_pct": 99.0})
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.yaml").write_text("data: {echo: 1}  # <b>&\n")
    (folder / "run.json").write_text("{}")
    return folder


def svgs(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page)]


def test_the_page_is_one_file_with_every_chart_and_no_network(tmp_path):
    folder = run(tmp_path / "a <b> run")
    write_report(folder)
    page = (folder / "report.html").read_text()
    assert not re.search(r"https?://|<script|<link|src=", page)
    assert "a &lt;b&gt; run" in page
    assert "<b>" not in page
    titles = re.findall("<h2>(.*?)</h2>", page)
    assert titles == [
        "waiting for data, % of the time",
        "GPU-Util and SM activity, %",
        "rows a second",
        "loss",
        "CPU, % of all",
        "GPU power, W",
    ]
    charts = dict(zip(titles, svgs(page), strict=True))
    assert [len(chart.findall("polyline")) for chart in charts.values()] == [1, 4, 2, 2, 1, 1]
    for chart in charts.values():
        for line in chart.findall("polyline"):
            points = [tuple(map(float, point.split(","))) for point in line.get("points").split()]
            assert all(70 <= x <= 860 and 10 <= y <= 176 for x, y in points)
            assert points == sorted(points)  # in time


def test_the_table_has_means_and_the_last_validation(tmp_path):
    found = {what: (value, unit) for what, value, unit in summary(read_metrics(run(tmp_path)))}
    assert found["fresh rows"] == ("12,376", "a second")  # of the last four of five points
    assert found["data wait"] == ("3.01", "% of the time")
    assert found["GPU-Util of gpu0"] == ("97.2", "%")
    assert found["GPU-Util of gpu1"] == ("50.1", "%")
    assert found["top1_pct of validation"] == ("99", "")
    assert "CPU, system" not in found  # not measured, so not there
    assert len(table(read_metrics(tmp_path)).splitlines()) == len(found)


def test_long_runs_are_thinned_out_and_keep_their_ends(tmp_path):
    write_report(run(tmp_path, 5000))
    charts = svgs((tmp_path / "report.html").read_text())
    points = charts[0].find("polyline").get("points").split()
    assert 300 < len(points) <= 600
    assert points[-1].startswith("860.0,")


@pytest.mark.parametrize("points", [0, 1])
def test_short_runs_have_a_page(tmp_path, points):
    write_report(run(tmp_path, points))
    assert svgs((tmp_path / "report.html").read_text())


def test_a_run_without_points_or_with_a_cut_line_is_no_error(tmp_path):
    write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()
    assert table([]) == ""
    path = run(tmp_path) / "metrics.jsonl"
    path.write_text(path.read_text()[:-20])
    assert len(read_metrics(tmp_path)) == 5
    assert [line.tag for line in lines_of(read_metrics(tmp_path), "util_pct")] == ["gpu0/util_pct", "gpu1/util_pct"]


def test_a_page_that_cannot_be_written_is_told(tmp_path, monkeypatch, capsys):
    def refuse(*_, **__):
        raise OSError(28, "No space left on device")

    run(tmp_path)
    monkeypatch.setattr(Path, "write_text", refuse)
    write_report(tmp_path)
    assert "cannot write" in capsys.readouterr().out


@pytest.mark.parametrize("end", ["raise ValueError('a bug')", "raise SystemExit(2)", "log.finish({}, {})"])
def test_however_a_run_ends_there_is_a_page(tmp_path, end):
    script = f"""
from pathlib import Path
from fastgpu.telemetry.log import Log
log = Log(Path({str(tmp_path)!r}), 100)
log.scalars(1, {{"train/loss": 0.5, "data/wait_pct": 1.0}})
{end}
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, check=False)
    assert "<polyline" in (tmp_path / "report.html").read_text()


def test_the_command_makes_the_page_of_a_run_that_was_killed(tmp_path):
    done = subprocess.run([sys.executable, "-m", "fastgpu.telemetry.report", run(tmp_path)], cwd=ROOT, check=False)
    assert done.returncode == 0
    assert (tmp_path / "report.html").exists()
