"""A run at a glance: a table for the terminal, and report.html, one file that needs no network.

python -m fastgpu.telemetry.report runs/<name>     writes the page again, also for a run that was killed
"""

import html
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import cycle
from math import ceil
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import yaml

from fastgpu.process.launch import warn
from fastgpu.telemetry import tags
from fastgpu.telemetry.ceiling import read_summary
from fastgpu.telemetry.tags import Tag

Point = Mapping[str, float]
"""A line of metrics.jsonl: step, time_s, the sums of a `Throughput` and {tag: value}."""

WAIT_PCT = 10.0
"""A run that waits for data for a larger part of its time is input-bound."""
IDLE_PCT = 20.0
"""A GPU that is idle for a larger part of the time, although it is fed, deserves a look."""

WIDTH = 860
HEIGHT = 200
LEFT = 70
TOP = 10
BOTTOM = 24
MAX_POINTS = 600
"""Points of a line in a chart; a longer line is thinned out."""
COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#475569")


class SummaryRow(NamedTuple):
    """One value of the whole run."""

    name: str
    title: str
    value: float
    unit: str


# ---------------------------------------------------------------------------------------------- what a run left


def read_metrics(folder: Path) -> list[Point]:
    """The points of metrics.jsonl. A last line that was cut off is left out."""
    try:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    points = []
    for line in lines:
        with suppress(ValueError):
            points.append(json.loads(line))
    return points


def read_config(folder: Path) -> dict[str, Any]:
    """{dotted key: value} of the newest config.yaml of a run; empty if there is none."""
    paths = sorted(folder.glob("config*.yaml"), key=lambda path: (len(path.name), path.name))  # -2, ..., -10
    try:
        tree = yaml.safe_load(paths[-1].read_text(encoding="utf-8"))
    except (IndexError, OSError, ValueError, yaml.YAMLError):
        return {}
    config: dict[str, Any] = {}
    for name, value in tree.items():
        config |= {f"{name}.{key}": part for key, part in value.items()} if isinstance(value, dict) else {name: value}
    return config


# ---------------------------------------------------------------------------------------------- one value of a run


def over_run(points: Sequence[Point], tag: Tag, name: str) -> float:
    """One value of the run for a tag, without its first point, which holds what happens only at the start.

    name: the tag's name in the points. A mean is weighted (see `tags.OverRun`): it is a sum divided by a sum. A point
    without the weight counts as 1.
    """
    logged = [point for point in points if name in point]
    if tag.over_run == "last":
        return logged[-1][name]
    steady = logged[1:] or logged
    values = [point[name] for point in steady]
    if tag.over_run == "minimum":
        return min(values)
    if tag.over_run == "maximum":
        return max(values)
    weights = [point.get(tag.over_run, 1.0) for point in steady]
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


def summary(points: Sequence[Point]) -> list[SummaryRow]:
    """The values of the run that have a title in the table of tags."""
    logged = _names(points)
    titled = [(tag, name) for tag in tags.TAGS if tag.title for name in tag.names(logged)]
    return [SummaryRow(name, _title(tag, name), over_run(points, tag, name), tag.unit) for tag, name in titled]


def table(points: Sequence[Point]) -> str:
    """The summary for a terminal; empty if nothing was logged."""
    rows = summary(points)
    width = max((len(row.title) for row in rows), default=0)
    return "\n".join(f"  {row.title:<{width}}  {_format(row.value):>10} {row.unit}".rstrip() for row in rows)


def _names(points: Sequence[Point]) -> list[str]:
    """The names of all tags that were logged, in the order in which they came."""
    return list(dict.fromkeys(name for point in points for name in point))


def _title(tag: Tag, name: str) -> str:
    """`SM activity, gpu0`; `CPU, user, machine1` on another machine than the first; `validation top1_pct`."""
    group, _, metric = name.rpartition("/")
    if name == tag.name:
        return tag.title
    if tag.name == "val/<metric>":
        return f"{tag.title} {metric}"
    return f"{tag.title}, {group.removesuffix('/host')}"


# ---------------------------------------------------------------------------------------------- verdicts


def verdicts(folder: Path, points: Sequence[Point]) -> list[str]:
    """Whether the run was fed, and what diagnose.py found out about a run with the same settings, if it did."""
    values = {row.name: row.value for row in summary(points)}
    lines = []
    if "data/wait_pct" in values:
        lines.append(feed_verdict(values["data/wait_pct"], values.get("gpu0/util_pct")))
    lines.append(read_summary(folder.parent, read_config(folder)))
    return [line for line in lines if line]


def feed_verdict(wait_pct: float, util_pct: float | None = None) -> str:
    """Whether a run is fed, in one line. wait_pct: its data wait. util_pct: GPU-Util, if there is a GPU."""
    if wait_pct > WAIT_PCT:
        return f"input-bound: {wait_pct:.0f} % of the time was spent waiting for data; run `python diagnose.py`"
    if util_pct is not None and util_pct < 100 - IDLE_PCT:
        idle_pct = 100 - util_pct
        return f"fed, but the GPU was idle {idle_pct:.0f} % of the time; `python diagnose.py` tells why"
    return f"fed: {wait_pct:.1f} % of the time was spent waiting for data"


# ---------------------------------------------------------------------------------------------- the page


def write_report(folder: Path) -> None:
    """Write report.html into the folder of a run, from its metrics.jsonl, run.json and config.yaml.

    Without points nothing is written. If the disk refuses, a warning is printed.
    """
    points = read_metrics(folder)
    if not points:
        return
    try:
        (folder / "report.html").write_text(_page(folder, points), encoding="utf-8")
    except OSError as error:
        warn(f"cannot write {folder / 'report.html'} ({error})")


def _page(folder: Path, points: Sequence[Point]) -> str:
    rows = ""
    for row in summary(points):
        rows += f"<tr><td>{html.escape(row.title)}<td class=number>{_format(row.value)}<td>{html.escape(row.unit)}"
    charts = ""
    logged = _names(points)
    for title, group in tags.charts().items():
        names = [name for tag in group for name in tag.names(logged)]
        if names:
            lines = [[(point["time_s"], point[name]) for point in points if name in point] for name in names]
            legend = " ".join(
                f'<span style="color: {colour}">{html.escape(name)}</span>'
                for name, colour in zip(names, cycle(COLOURS), strict=False)
            )
            charts += f"<h2>{html.escape(title)}</h2>{_svg(lines)}<p class=legend>{legend}</p>"
    details = ""
    for path in (*sorted(folder.glob("*.yaml")), *sorted(folder.glob("run*.json"))):
        text = html.escape(path.read_text(encoding="utf-8"))
        details += f"<details><summary>{html.escape(path.name)}</summary><pre>{text}</pre></details>"
    return PAGE.substitute(
        name=html.escape(folder.name),
        verdicts="".join(f"<p>{html.escape(line)}</p>" for line in verdicts(folder, points)),
        rows=rows,
        charts=charts,
        details=details,
    )


PAGE = Template("""<!doctype html>
<html lang=en><meta charset=utf-8><title>$name</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #0f172a }
h1 { font-size: 1.4rem } h2 { font-size: 1rem; margin: 1.6rem 0 .2rem }
table { border-collapse: collapse } td { padding: .1rem .8rem .1rem 0 } .number { text-align: right }
svg { width: 100%; height: auto } .legend { margin: 0 0 0 4.4rem; font-size: 11px } .legend span { margin-right: 1rem }
pre { overflow: auto; background: #f1f5f9; padding: .6rem }
</style>
<h1>$name</h1>
$verdicts
<table>$rows</table>
$charts
$details
</html>
""")


def _svg(lines: Sequence[Sequence[tuple[float, float]]]) -> str:
    """A chart of lines of (time in s, value). The scale begins at 0 unless a value is negative."""
    values = [value for line in lines for _, value in line]
    begin_s = min(line[0][0] for line in lines)
    end_s = max(line[-1][0] for line in lines)
    low = min(0.0, *values)
    high = max(values)
    x_scale = (WIDTH - LEFT) / ((end_s - begin_s) or 1)
    y_scale = (HEIGHT - TOP - BOTTOM) / ((high - low) or 1)
    floor = HEIGHT - BOTTOM
    parts = []
    for value in (low, (low + high) / 2, high):
        y = floor - y_scale * (value - low)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e2e8f0"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_format(value)}</text>')
    for anchor, x, time_s in (("start", LEFT, begin_s), ("end", WIDTH, end_s)):
        parts.append(f'<text x="{x}" y="{HEIGHT - 6}" text-anchor="{anchor}">{_format(time_s)} s</text>')
    for line, colour in zip(lines, cycle(COLOURS), strict=False):
        every = ceil(len(line) / MAX_POINTS)
        corners = [
            f"{LEFT + x_scale * (time_s - begin_s):.1f},{floor - y_scale * (value - low):.1f}"
            for time_s, value in line[::-every]  # from its end, so that the last point is among them
        ]
        line_style = f'fill="none" stroke="{colour}" stroke-width="1.5"'
        parts.append(f'<polyline points="{" ".join(reversed(corners))}" {line_style}/>')
        last_x, last_y = corners[0].split(",")
        parts.append(f'<circle cx="{last_x}" cy="{last_y}" r="2.5" fill="{colour}"/>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-size="11">{"".join(parts)}</svg>'


def _format(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        write_report(Path(name))
