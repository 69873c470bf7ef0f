import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from written_run import write_points, write_run

from fastgpu.report import page as page_module
from fastgpu.report.page import MAX_POINTS, TIMELINE, write_comparison, write_report

EVIL = '</script><img src=x onerror="alert(1)">'
"""A name that runs as code where it is not escaped."""


class Page(HTMLParser):
    """The tags and the visible text of a page."""

    def __init__(self, path: Path):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.html = path.read_text(encoding="utf-8")
        self.feed(self.html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += f"{data}\n"

    @property
    def charts(self) -> dict[str, dict]:
        data = re.search(r"<script type=application/json id=data>(.*?)</script>", self.html, re.DOTALL)[1]
        return {chart["title"]: chart for chart in json.loads(data)}

    def lines(self, title: str) -> dict[str, dict[float, float]]:
        """{label: {step: value}} of a chart."""
        chart = self.charts[title]
        return {
            each["label"]: {x: y for x, y in zip(chart["x"], each["values"], strict=True) if y is not None}
            for each in chart["series"]
        }


def report_of(folder: Path) -> Page:
    write_report(folder)
    return Page(folder / "report.html")


def point(step: int, *, part: int = 1, steps: int = 1, wait_s: float = 0.0, **values: float) -> dict[str, float]:
    place = {"step": step, "time_s": 1.0, "part": part, "steps": steps, "seconds": 1.0, "wait_s": wait_s}
    return place | {name.replace("__", "/"): value for name, value in values.items()}


def test_the_page_is_one_file_with_every_chart_and_no_network(tmp_path):
    page = report_of(write_run(tmp_path / "a"))
    assert not [attrs for _, attrs in page.tags if {"src", "srcset"} & set(attrs)]
    assert "link" not in {tag for tag, _ in page.tags}
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|\bimport\(", page.html)
    assert {title: len(chart["series"]) for title, chart in page.charts.items()} == {
        "loss": 2,
        "val, %": 1,
        TIMELINE: 2,
        "data, %": 1,
        "data, rows/s": 1,
        "train, rows/s": 1,
        "gpu, %": 4,
        "gpu, W": 1,
        "host, %": 1,
    }
    for shown in ("The device is fed", "best top1_pct", "at step 5", "GPU-Util", "python train.py", "config.yaml"):
        assert shown in page.text
    assert "CPU, user" not in page.text.split("over the whole run")[0]  # the GPU is more interesting


def test_nothing_that_a_user_named_is_code(tmp_path):
    folder = write_points(tmp_path / EVIL.replace("/", "%2F"), [{"step": 1, "time_s": 1.0, f"val/{EVIL}": 1.0, "x": 1}])
    folder.joinpath("config.yaml").write_text(f"workload: {EVIL!r}\n")
    description = {"command": [EVIL], "gpu": EVIL, "started": EVIL, "best": [EVIL, "higher"]}
    folder.joinpath("run.json").write_text(json.dumps(description))
    (folder / "checkpoints" / EVIL.replace("/", "-")).mkdir(parents=True)
    write_comparison({EVIL: folder, "b": write_run(tmp_path / "b")}, tmp_path / "ab.html")
    for page in (report_of(folder), Page(tmp_path / "ab.html")):
        assert "img" not in {tag for tag, _ in page.tags}
        assert sum(tag == "script" for tag, _ in page.tags) == 3  # uPlot, the data and the page's own
        assert "alert(1)" in page.text
        json.dumps(page.charts)  # can be read


def test_the_parts_of_a_resumed_run_follow_one_another(tmp_path):
    first = [point(step, train__loss=1.0) for step in range(1, 9)]
    again = [point(step, part=2, train__loss=2.0) for step in range(6, 12)]  # from a checkpoint at step 5
    page = report_of(write_points(tmp_path, [*first, *again]))
    loss = page.lines("loss")["train/loss"]
    assert loss == {step: 1.0 if step <= 5 else 2.0 for step in range(1, 12)}
    for chart in page.charts.values():
        assert all(before < after for before, after in pairwise(chart["x"]))
        assert chart["resumed_at"] == [5]
    assert "in 2 parts" in page.text


def test_the_timeline_adds_up_to_the_time_of_a_step(tmp_path):
    points = [point(10, steps=10, wait_s=0.25), point(15, steps=5, wait_s=0.0), point(15, steps=0)]
    assert report_of(write_points(tmp_path, points)).lines(TIMELINE) == {
        "waiting for data": {10: 25.0, 15: 0.0},
        "training": {10: 75.0, 15: pytest.approx(400.0)},  # the last point of the step has the same time again
    }


def test_long_runs_are_thinned_out_as_sums_over_sums_and_keep_their_end(tmp_path):
    points = [point(step, data__wait_pct=100.0 * (step % 2), val__a=float(step)) for step in range(1, 5001)]
    page = report_of(write_points(tmp_path, points))
    waits = page.lines("data, %")["data/wait_pct"]
    assert MAX_POINTS / 2 < len(waits) <= MAX_POINTS
    assert all(30 < value < 70 for value in waits.values())  # no spike was picked
    assert page.lines("val/a")["val/a"][5000] == 5000


def test_a_page_of_eight_gpus_and_a_long_run_is_small(tmp_path):
    names = [f"gpu{n}__{name}" for n in range(8) for name in ("util_pct", "util_min_pct", "sm_active_pct", "power_w")]
    points = [point(step, **dict.fromkeys(names, 12.3456 + step)) for step in range(1, 2001)]
    write_report(write_points(tmp_path, points))
    assert (tmp_path / "report.html").stat().st_size < 500_000


def test_checkpoints_are_linked_relative_to_the_page(tmp_path):
    write_run(tmp_path)
    (tmp_path / "checkpoints/best-000004").mkdir(parents=True)
    page = report_of(tmp_path)
    links = [attrs["href"] for tag, attrs in page.tags if tag == "a"]
    assert links == ["checkpoints/best-000004/"]
    assert (tmp_path / links[0]).is_dir()


@pytest.mark.parametrize("n_points", [0, 1])
def test_short_runs_and_values_that_are_no_numbers_have_a_page(tmp_path, n_points):
    page = report_of(write_run(tmp_path / "a", n_points))
    assert page.lines("loss")["val/loss"] == {n_points: 0.25}
    values = [{"step": n, "time_s": n, "val/loss": value} for n, value in enumerate((float("nan"), 2.0, float("inf")))]
    assert report_of(write_points(tmp_path / "b", values)).lines("loss")["val/loss"] == {1: 2.0}


def test_a_run_without_points_has_no_page(tmp_path):
    write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_a_page_that_cannot_be_written_is_reported(tmp_path, monkeypatch, capsys):
    def refuse(*_, **__):
        raise OSError(28, "No space left on device")

    write_run(tmp_path)
    monkeypatch.setattr(page_module, "write_whole", refuse)
    write_report(tmp_path)
    assert "warning: cannot write" in capsys.readouterr().out


def test_the_curves_of_compared_runs_are_in_the_same_charts(tmp_path):
    a = write_points(tmp_path / "a", [point(step, train__loss=1.0) for step in (1, 2, 3)])
    b = write_points(tmp_path / "b", [point(step, train__loss=2.0) for step in (2, 4)])
    write_comparison({"a": a, "b": b}, tmp_path / "ab.html")
    lines = Page(tmp_path / "ab.html").lines("train/loss")
    assert lines == {"a": {1: 1.0, 2: 1.0, 3: 1.0}, "b": {2: 2.0, 4: 2.0}}
