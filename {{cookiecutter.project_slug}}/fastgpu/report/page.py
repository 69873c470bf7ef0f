"""report.html of a run: one file that needs no network.

The page is page.html beside this file; uPlot (https://github.com/leeoniya/uPlot, MIT licence, in vendor/) draws its
charts in the browser from the values that are written into it here.
"""

import html
import json
import re
from collections.abc import Mapping, Sequence
from math import ceil, isfinite
from pathlib import Path
from string import Template
from typing import Any

from fastgpu.process.launch import UserError
from fastgpu.report import results
from fastgpu.report.results import Point, Run

MAX_POINTS = 1000
"""Of a longer run, every second (third, ...) point is drawn, and all that hold metrics."""
FIRST = ("train/loss", "val/", "train/trained_rows_per_s", "data/", "train/lr", "")
"""Beginnings of the names of scalars, in the order of their charts."""
UNITS = {"pct": "%", "rows_per_s": "rows/s", "ms": "ms", "gib": "GiB", "mb_per_s": "MB/s", "w": "W", "c": "°C"}
"""{end of the name of a scalar: its unit}"""


def write_report(run: Run) -> Path:
    """Write report.html into the folder of a run. Raises UserError if the disk refuses."""
    here = Path(__file__).parent
    began, device = run.description.get("started", ""), run.description.get("gpu") or "CPU"
    values = dict(results.describe(run))
    best = {name: value for name, value in values.items() if name.startswith("best ")}
    speed = {title: values[name] for name, title in results.SPEED.items() if name in values}
    settings = {key: results.setting_text(value) for key, value in results.changed_settings(run).items()}
    text = Template((here / "page.html").read_text(encoding="utf-8")).substitute(
        title=html.escape(run.folder.name),
        facts=html.escape(f"{began} · {device} · {run.points[-1]['step']:,.0f} steps"),
        cards=_fill("<div><span>{}</span><b>{}</b></div>", best | speed),
        settings=_fill("<tr><td>{}<td>{}", settings),
        values=_fill("<tr><td>{}<td>{}", values),
        data=json.dumps(_charts(run.points), separators=(",", ":")).replace("<", "\\u003c"),  # nothing ends the script
        uplot_css=(here / "vendor/uPlot.min.css").read_text(encoding="utf-8"),
        uplot_js=(here / "vendor/uPlot.iife.min.js").read_text(encoding="utf-8"),
    )
    path = run.folder / "report.html"
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} was not written: {error.strerror}") from None
    return path


def _fill(form: str, values: Mapping[str, str]) -> str:
    return "".join(form.format(html.escape(name), html.escape(value)) for name, value in values.items())


def _charts(points: Sequence[Point]) -> list[dict[str, Any]]:
    """The scalars of a group that have one unit are a chart. Quality comes first, then speed and the learning rate."""
    every = ceil(len(points) / MAX_POINTS)
    steps: dict[float, Point] = {}
    for place, point in enumerate(points):
        if place % every == 0 or any(name.startswith("val/") for name in point):
            steps[point["step"]] = steps.get(point["step"], {}) | point
    names = {name for point in points for name in point if "/" in name}
    charts: dict[str, dict[str, Any]] = {}
    for name in sorted(names, key=lambda name: ([name.startswith(each) for each in FIRST].index(True), name)):
        title = _title(name)
        chart = charts.setdefault(title, {"title": title, "x": list(steps), "series": []})
        chart["series"].append({"label": name, "values": [_value(point.get(name)) for point in steps.values()]})
    return list(charts.values())


def _title(name: str) -> str:
    group = re.sub(r"\d+$", "", name.partition("/")[0])  # gpu0 and gpu1 together
    unit = next((unit for end, unit in UNITS.items() if name.endswith(f"_{end}")), "")
    if name.endswith("/loss"):
        return "loss"
    return f"{group}, {unit}" if unit else name


def _value(value: float | None) -> float | None:
    """Four figures. NaN and infinity are no JSON."""
    return None if value is None or not isfinite(value) else float(f"{value:.4g}")
