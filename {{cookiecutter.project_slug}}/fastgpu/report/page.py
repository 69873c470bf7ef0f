"""report.html of a run, and a page that compares runs: each is one file that needs no network.

The page is page.html beside this file; uPlot (https://github.com/leeoniya/uPlot, MIT licence, in vendor/) draws its
charts in the browser from the values that are written into it here.
"""

import html
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from math import ceil, isfinite
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import quote

from fastgpu.process.files import write_whole
from fastgpu.process.launch import UserError, warn
from fastgpu.report import results
from fastgpu.report.results import Point, Table

MAX_POINTS = 600
"""Points of a line in a chart. Of a longer line, neighbouring points are combined into one."""
MAX_VALUES = 40_000
"""Values on a page; a page with many lines has fewer points of each."""
TIMELINE = "where the time of a step goes, ms"
HEADLINES = {
    "fed": "The device is fed",
    "idle": "Rows are ready, but the GPU is often idle",
    "waits": "The device waits for data",
}


def write_report(folder: Path) -> None:
    """Write report.html into the folder of a run, from its metrics.jsonl, run*.json and config*.yaml.

    Without points nothing is written. If the disk refuses, a warning is printed.
    """
    points = results.read_metrics(folder)
    if not points:
        return
    try:
        write_whole(folder / "report.html", _run_page(folder, points))
    except OSError as error:
        warn(f"cannot write {folder / 'report.html'} ({error})")


def write_comparison(runs: Mapping[str, Path], path: Path) -> None:
    """Write a page with the differences and the curves of several runs. runs: {label: folder}.

    Raises UserError if the page cannot be written.
    """
    title = " / ".join(runs)
    tables = _table(results.differing_settings(runs)) + _table(results.differing_values(runs))
    text = _page(title, f"<h1>{html.escape(title)}</h1>{tables}", _comparison_charts(runs))
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"-o {path}: {error.strerror}; name a file in a folder that can be written") from None


# ---------------------------------------------------------------------------------------------- one run


def _run_page(folder: Path, points: Sequence[Point]) -> str:
    description = results.read_run(folder)
    verdict = results.run_verdict(points)
    line = f"<p>{html.escape(verdict.text)}</p>" if verdict else ""
    headline = HEADLINES[verdict.kind] if verdict else folder.name
    top = f'<section class="verdict {verdict.kind if verdict else ""}"><h1>{html.escape(headline)}</h1>{line}</section>'
    facts = [folder.name, description.get("started", ""), description.get("gpu") or "CPU"]
    top += f"<p class=facts>{html.escape(' · '.join(filter(None, facts)))}</p>"
    cards = "".join(
        f"<div><span>{html.escape(title)}</span><b>{html.escape(value)}</b><span>{html.escape(note)}</span></div>"
        for title, value, note in _cards(points, folder)
    )
    numbers = [["over the whole run", ""]]
    numbers += [[name, results.number(value)] for name, value in results.summary(points).items()]
    bottom = _table(numbers) + _checkpoints(folder)
    folded = {"command": shlex.join(["python", *description.get("command", ())])}
    for path in (*results.numbered(folder, "config*.yaml"), *results.numbered(folder, "run*.json")):
        folded[path.name] = path.read_text(encoding="utf-8")
    for name, text in folded.items():
        bottom += f"<details><summary>{html.escape(name)}</summary><pre>{html.escape(text)}</pre></details>"
    return _page(folder.name, f"{top}<section class=cards>{cards}</section>", _run_charts(points), bottom)


def _cards(points: Sequence[Point], folder: Path) -> list[tuple[str, str, str]]:
    """(title, value, note) of the few numbers that matter most."""
    values = results.summary(points)
    cards = []
    if best := results.best(points, folder):
        cards.append((f"best {best.metric}", results.number(best.value), f"at step {best.step:,.0f}"))
    for name, title, note in (
        ("train/trained_rows_per_s", "speed", "trained rows/s"),
        ("data/wait_pct", "data wait", "% of the time"),
        ("gpu0/util_pct", "GPU-Util", "% of the time"),
        ("host/cpu_user_pct", "CPU, user", "% of all CPUs"),
    ):
        is_shown = name in values and not (name.startswith("host") and "gpu0/util_pct" in values)
        if is_shown:
            cards.append((title, results.number(values[name]), note))
    trained_s = sum(point.get("seconds", 0) for point in points)
    n_parts = len({point.get("part", 1) for point in points})
    parts = f" in {n_parts} parts" if n_parts > 1 else ""
    cards.append(("training time", _duration(trained_s), f"{points[-1]['step']:,.0f} steps{parts}"))
    return cards


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def _checkpoints(folder: Path) -> str:
    """Links to the checkpoints, relative to the page."""
    links = ""
    for path in sorted(folder.glob("checkpoints/*-*")):
        links += f'<li><a href="checkpoints/{quote(path.name)}/">{html.escape(path.name)}</a>'
    return f"<h2>checkpoints</h2><ul>{links}</ul>" if links else ""


# ---------------------------------------------------------------------------------------------- charts


def _run_charts(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Loss and metrics, where the time goes, then all other scalars."""
    names = results.scalars_of(points)
    rows = _by_step(points, names)
    starts = {point.get("part", 1): point["step"] - point.get("steps", 0) for point in reversed(points)}
    shared: dict[str, Any] = {"x": [row["step"] for row in rows], "resumed_at": sorted(starts.values())[1:]}
    learning: list[dict[str, Any]] = []
    other: list[dict[str, Any]] = []
    for title, drawn in results.charts(names).items():
        is_learning = drawn[0].startswith(("train/loss", "val/"))
        series = [_series(name, [row.get(name) for row in rows]) for name in drawn]
        (learning if is_learning else other).append(shared | {"title": title, "series": series})
    stack = {"waiting for data": "wait_ms", "training": "train_ms"}
    series = [_series(label, [row.get(name) for row in rows]) for label, name in stack.items()]
    return [*learning, shared | {"title": TIMELINE, "series": series, "is_stacked": True}, *other]


def _by_step(points: Sequence[Point], names: Sequence[str]) -> list[dict[str, float]]:
    """{"step": ..., name: value} for each step, or for several neighbouring steps if the page would grow too large.

    Besides the names there are wait_ms and train_ms, the parts of the time of one step.
    """
    by_step: dict[float, list[Point]] = {}
    for point in points:
        by_step.setdefault(point["step"], []).append(point)
    steps = list(by_step)
    n_together = ceil(len(steps) / min(MAX_POINTS, MAX_VALUES // (len(names) + 2)))
    rows = []
    for begin in range(0, len(steps), n_together):
        together = steps[begin : begin + n_together]
        bucket = [point for step in together for point in by_step[step]]
        row = {"step": together[-1]}
        for name in names:
            having = [point for point in bucket if name in point]
            if having:
                row[name] = results.combine(having, name)
        n_steps, seconds, wait_s = (
            sum(point.get(key, 0) for point in bucket) for key in ("steps", "seconds", "wait_s")
        )
        if n_steps:
            row |= {"wait_ms": 1000 * wait_s / n_steps, "train_ms": 1000 * (seconds - wait_s) / n_steps}
        rows.append(row)
    return rows


def _comparison_charts(runs: Mapping[str, Path]) -> list[dict[str, Any]]:
    """One chart for each scalar, with a line for each run."""
    points_of = {label: results.read_metrics(folder) for label, folder in runs.items()}
    names = results.scalars_of(point for points in points_of.values() for point in points)
    by_run = {label: {row["step"]: row for row in _by_step(points, names)} for label, points in points_of.items()}
    steps = sorted({step for rows in by_run.values() for step in rows})
    charts = []
    for name in names:
        series = [_series(label, [rows.get(x, {}).get(name) for x in steps]) for label, rows in by_run.items()]
        charts.append({"title": name, "x": steps, "series": series, "resumed_at": []})
    return charts


def _series(label: str, values: Iterable[float | None]) -> dict[str, Any]:
    known = [None if value is None or not isfinite(value) else float(f"{value:.4g}") for value in values]
    return {"label": label, "values": known}


# ---------------------------------------------------------------------------------------------- HTML


def _page(title: str, top: str, charts: Sequence[Mapping[str, Any]], bottom: str = "") -> str:
    folder = Path(__file__).parent
    template = Template((folder / "page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=html.escape(title),
        top=top,
        bottom=bottom,
        data=json.dumps(charts, separators=(",", ":")).replace("<", "\\u003c"),  # no text in it can end the script
        uplot_css=(folder / "vendor/uPlot.min.css").read_text(encoding="utf-8"),
        uplot_js=(folder / "vendor/uPlot.iife.min.js").read_text(encoding="utf-8"),
    )


def _table(lines: Table) -> str:
    """An HTML table; the first line holds its titles."""
    if len(lines) < 2:
        return ""
    head, *rows = ("".join(f"<td>{html.escape(cell)}" for cell in line) for line in lines)
    return f"<div class=wide><table><thead><tr>{head}<tbody>{''.join(f'<tr>{row}' for row in rows)}</table></div>"
