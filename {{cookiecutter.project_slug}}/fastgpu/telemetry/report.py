"""A run at a glance: a table for the terminal, and report.html, one file that needs no network.

python -m fastgpu.telemetry.report runs/<name>     makes the page again, also of a run that was killed
"""

import html
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from string import Template
from typing import Any, NamedTuple

from fastgpu.telemetry.ceiling import read_summary

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 860, 200, 70, 10, 24
MAX_POINTS = 600  # of a line; more are thinned out
COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#475569")
ROWS = {  # tag -> what the table calls it, unit
    "data/fresh_rows_per_s": ("fresh rows", "a second"),
    "train/trained_rows_per_s": ("trained rows", "a second"),
    "train/step_ms": ("a step", "ms, its wait included"),
    "data/wait_pct": ("data wait", "% of the time"),
    "data/feed_ratio": ("feed ratio", "of the speed that diagnose.py measured without a feed"),
    "util_pct": ("GPU-Util", "%"),
    "util_min_pct": ("GPU-Util, least", "%"),
    "sm_active_pct": ("SM activity", "%"),
    "tensor_active_pct": ("tensor cores", "%"),
    "mem_peak_gib": ("GPU memory, peak of tensors", "GiB"),
    "power_w": ("GPU power", "W"),
    "energy_j_per_1000_rows": ("GPU energy", "J a 1,000 trained rows"),
    "clock_limited_pct": ("GPU clocks held down", "% of the time"),
    "host/cpu_user_pct": ("CPU, user", "% of all"),
    "host/cpu_system_pct": ("CPU, system", "% of all"),
    "host/cpu_iowait_pct": ("CPU, waits for disks", "% of all"),
    "host/rss_gib": ("memory of the first process", "GiB"),
    "host/disk_read_mb_per_s": ("disks, read", "MB/s"),
}
CHARTS = {  # title -> tags; those of GPUs stand for each GPU's
    "waiting for data, % of the time": ("data/wait_pct",),
    "GPU-Util and SM activity, %": ("util_pct", "util_min_pct", "sm_active_pct"),
    "rows a second": ("data/fresh_rows_per_s", "train/trained_rows_per_s"),
    "loss": ("train/loss", "val/loss"),
    "CPU, % of all": ("host/cpu_user_pct", "host/cpu_system_pct", "host/cpu_iowait_pct"),
    "GPU power, W": ("power_w",),
    "disks, MB/s read": ("host/disk_read_mb_per_s",),
}


WAIT_PCT = 10.0
"""A run that waits for data for a larger part of its time is input-bound."""
IDLE_SHARE = 0.2
"""A GPU that is idle for a larger part of the time, although it is fed, deserves a look."""


class Line(NamedTuple):
    """Points (time in s, value) of one tag."""

    tag: str
    points: list[tuple[float, float]]


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """The points of metrics.jsonl; a last line that was cut is left out."""
    found = []
    try:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def lines_of(metrics: Sequence[Mapping[str, float]], tag: str) -> list[Line]:
    """Of a tag such as data/wait_pct; of a bare name such as util_pct those of every GPU of every machine."""
    tags = dict.fromkeys(name for point in metrics for name in point)
    names = [tag] if "/" in tag else [name for name in tags if re.fullmatch(rf"(machine\d+/)?gpu\d+/{tag}", name)]
    found = [Line(name, [(point["time_s"], point[name]) for point in metrics if name in point]) for name in names]
    return [line for line in found if line.points]


def summary(metrics: Sequence[Mapping[str, float]]) -> list[tuple[str, str, str]]:
    """(what, value, unit): means over the points of the run but the first, which holds what only happens at the start;
    the last one of each validation metric."""
    found = []
    for tag, (what, unit) in ROWS.items():
        for line in lines_of(metrics, tag):
            gpu = "" if "/" in tag else f" of {line.tag.rpartition('/')[0]}"
            values = [value for _, value in line.points]
            found.append((what + gpu, _say(fmean(values[1:] or values)), unit))
    last = {tag: value for point in metrics for tag, value in point.items() if tag.startswith("val/")}
    return found + [(f"{tag.removeprefix('val/')} of validation", f"{value:.4g}", "") for tag, value in last.items()]


def verdicts(folder: Path, metrics: Sequence[Mapping[str, float]], config: Mapping[str, Any]) -> list[str]:
    """Whether the run was fed, and what diagnose.py found of just such a run, if it was asked."""
    means = {
        tag: fmean([v for _, v in line.points[1:] or line.points])
        for tag in ("data/wait_pct", "util_pct")
        for line in lines_of(metrics, tag)[:1]
    }
    found = [feed_verdict(means["data/wait_pct"], means.get("util_pct"))] if "data/wait_pct" in means else []
    return found + [line for line in [read_summary(folder.parent, config)] if line]


def feed_verdict(wait_pct: float, util_pct: float | None = None) -> str:
    """What a run says of itself, in a line. wait_pct: of the time, for data. util_pct: GPU-Util, where there is one."""
    if wait_pct > WAIT_PCT:
        return f"input-bound: {wait_pct:.0f} % of the time waits for data; run `python diagnose.py`"
    if util_pct is not None and util_pct < 100 * (1 - IDLE_SHARE):
        return (
            f"fed, but the GPU is idle {100 - util_pct:.0f} % of the time (LAUNCH, SYNC or COMM): `python diagnose.py`"
        )
    return f"fed: {wait_pct:.1f} % of the time waits for data"


def table(metrics: Sequence[Mapping[str, float]]) -> str:
    """The summary for a terminal; empty if nothing was logged."""
    rows = summary(metrics)
    wide = max((len(what) for what, _, _ in rows), default=0)
    return "\n".join(f"  {what:<{wide}}  {value:>10} {unit}".rstrip() for what, value, unit in rows)


def write_report(folder: Path, config: Mapping[str, Any] | None = None) -> None:
    """report.html of a run's folder, from its metrics.jsonl, run.json and config.yaml; nothing if there are no points.

    A page that cannot be written is no reason to stop: it is told, and that is all.
    """
    metrics = read_metrics(folder)
    if not metrics:
        return
    rows = "".join(
        f"<tr><td>{html.escape(what)}<td class=number>{html.escape(value)}<td>{html.escape(unit)}"
        for what, value, unit in summary(metrics)
    )
    charts = []
    for title, tags in CHARTS.items():
        lines = [line for tag in tags for line in lines_of(metrics, tag)]
        if lines:
            charts.append(f"<h2>{html.escape(title)}</h2>{_svg(lines)}")
    said = "".join(f"<p>{html.escape(line)}</p>" for line in verdicts(folder, metrics, config or {}))
    details = ""
    for path in (*sorted(folder.glob("*.yaml")), *sorted(folder.glob("run*.json"))):
        text = html.escape(path.read_text(encoding="utf-8"))
        details += f"<details><summary>{html.escape(path.name)}</summary><pre>{text}</pre></details>"
    page = PAGE.substitute(name=html.escape(folder.name), said=said, rows=rows, charts="".join(charts), details=details)
    try:
        (folder / "report.html").write_text(page, encoding="utf-8")
    except OSError as error:
        print(f"warning: cannot write {folder / 'report.html'} ({error})", flush=True)


PAGE = Template("""<!doctype html>
<html lang=en><meta charset=utf-8><title>$name</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #0f172a }
h1 { font-size: 1.4rem } h2 { font-size: 1rem; margin: 1.6rem 0 .2rem }
table { border-collapse: collapse } td { padding: .1rem .8rem .1rem 0 } .number { text-align: right }
svg { width: 100%; height: auto } pre { overflow: auto; background: #f1f5f9; padding: .6rem }
</style>
<h1>$name</h1>
$said
<table>$rows</table>
$charts
$details
</html>
""")


def _svg(lines: Sequence[Line]) -> str:
    """A line chart over time; the scale begins at 0 where no value is below it."""
    lines = [Line(line.tag, _thinned(line.points)) for line in lines]
    times = [time for line in lines for time, _ in line.points]
    values = [value for line in lines for _, value in line.points]
    begin, end = min(times), max(times)
    low, high = min(0.0, *values), max(values)
    high = high if high > low else low + 1

    def place(time: float, value: float) -> str:
        x = LEFT + (WIDTH - LEFT) * (time - begin) / (end - begin or 1)
        return f"{x:.1f},{TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low):.1f}"

    parts = []
    for share in (0.0, 0.5, 1.0):
        value, y = low + share * (high - low), HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e2e8f0"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" font-size="11">{_say(value)}</text>')
    for anchor, x, time in (("start", LEFT, begin), ("end", WIDTH, end)):
        parts.append(f'<text x="{x}" y="{HEIGHT - 6}" text-anchor="{anchor}" font-size="11">{_say(time)} s</text>')
    for number, line in enumerate(lines):
        colour, points = COLOURS[number % len(COLOURS)], " ".join(place(*point) for point in line.points)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(
            f'<circle cx="{points.rpartition(" ")[2].split(",")[0]}" '
            f'cy="{points.rpartition(",")[2]}" r="2.5" fill="{colour}"/>'
        )
        parts.append(
            f'<text x="{LEFT + 110 + 190 * number}" y="{HEIGHT - 6}" font-size="11" fill="{colour}">'
            f"{html.escape(line.tag)}</text>"
        )
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most MOST_POINTS of them, the last one among them."""
    step = -(-len(points) // MAX_POINTS)
    return points[::-1][::step][::-1]


def _say(value: Any) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        write_report(Path(name))
