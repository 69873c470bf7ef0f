"""report.html of a run: one file that needs no network.

The page is page.html beside this file; uPlot (https://github.com/leeoniya/uPlot, MIT licence, in vendor/) draws its
charts in the browser from the values that are written into it here.
"""

import html
import json
import re
from collections.abc import Iterable, Sequence
from math import ceil, isfinite, nan
from pathlib import Path
from string import Template
from typing import Any

from fastgpu.process.files import new_file
from fastgpu.report import ledger, results
from fastgpu.report.results import Point, Run

MAX_POINTS = 1000
"""Of a longer run, every second (third, ...) point is drawn, and all that hold metrics."""


def write_report(run: Run) -> Path:
    """Write report.html into the folder of a run. Raises UserError or OSError if the disk refuses."""
    here = Path(__file__).parent
    began, device = run.description.get("started", ""), run.description.get("gpu") or "CPU"
    summary = results.summary(run)
    scalars = [name for name in summary if any(name in point for point in run.points)]
    values = [(name, results.number(value)) for name, value in summary.items()]
    settings = [(key, results.setting_text(value)) for key, value in results.changed_settings(run).items()]
    rows = ledger.as_rows(run.ledger)[:-1]
    parts = [(share.removesuffix(" %"), str(colour), kind, time) for colour, (kind, time, share) in enumerate(rows)]
    text = Template((here / "page.html").read_text(encoding="utf-8")).substitute(
        title=html.escape(run.folder.name),
        facts=html.escape(f"{began} · {device} · {run.points[-1]['step']:,.0f} steps"),
        cards=_fill("<div><span>{}</span><b>{}</b></div>", values[:6]),  # quality and speed
        ledger=_fill('<div style="flex-grow: {0}; --of: var(--c{1})" title="{2}: {3}"></div>', parts),
        legend=_fill('<li style="--of: var(--c{1})">{2} {3}, {0} %', parts),
        settings=_fill("<tr><td>{}<td>{}", settings),
        values=_fill("<tr><td>{}<td>{}", values),
        data=json.dumps(_charts(run.points, scalars)).replace("<", "\\u003c"),  # nothing ends the script
        uplot_css=(here / "vendor/uPlot.min.css").read_text(encoding="utf-8"),
        uplot_js=(here / "vendor/uPlot.iife.min.js").read_text(encoding="utf-8"),
    )
    path = run.folder / "report.html"
    with new_file(path, replace=True) as partial:
        partial.write_text(text, encoding="utf-8", errors="replace")
    return path


def _fill(form: str, values: Iterable[tuple[str, ...]]) -> str:
    return "".join(form.format(*map(html.escape, texts)) for texts in values)


def _charts(points: Sequence[Point], names: Iterable[str]) -> list[dict[str, Any]]:
    """The scalars of a group that have one unit are a chart. NaN and infinity, which are no JSON, are left out."""
    steps: dict[float, Point] = {}
    every = ceil(len(points) / MAX_POINTS)
    for place, point in enumerate(points):
        if place % every == 0 or any(name.startswith("val/") for name in point):
            steps[point["step"]] = steps.get(point["step"], {}) | point
    charts: dict[str, dict[str, Any]] = {}
    for name in names:
        values = [point.get(name, nan) for point in steps.values()]
        shown = [float(f"{value:.4g}") if isfinite(value) else None for value in values]
        chart = charts.setdefault(_title(name), {"title": _title(name), "x": list(steps), "series": []})
        chart["series"].append({"label": name, "values": shown})
    return list(charts.values())


def _title(name: str) -> str:
    group = re.sub(r"\d+$", "", name.partition("/")[0])  # gpu0 and gpu1 together
    if name.endswith("/loss"):
        return "loss"
    unit = re.search(r"_([a-z]+_per_s|[a-z]+)$", name)
    return f"{group}, {unit[1]}" if unit else name
