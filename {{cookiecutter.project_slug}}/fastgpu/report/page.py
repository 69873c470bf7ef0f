"""report.html of a run: one file that needs no network.

The page is page.html beside this file; uPlot (https://github.com/leeoniya/uPlot, MIT licence, in vendor/) draws its
charts in the browser from the values that are written into it here.
"""

import html
import json
import re
import shlex
from collections.abc import Iterable, Sequence
from math import ceil, isfinite
from pathlib import Path
from string import Template
from typing import Any

from fastgpu.process.files import write_whole
from fastgpu.process.launch import UserError
from fastgpu.report import results
from fastgpu.report.results import Point, Run

MAX_VALUES = 40_000
"""Values on a page. Of longer lines, neighbouring points are combined into one."""
MAX_POINTS = 600
UNITS = {"pct": "%", "rows_per_s": "rows/s", "ms": "ms", "gib": "GiB", "mb_per_s": "MB/s", "w": "W", "c": "°C"}
"""{end of the name of a scalar: its unit}"""


def write_report(run: Run) -> Path:
    """Write report.html into the folder of a run. Raises UserError if the disk refuses."""
    folder = Path(__file__).parent
    template = Template((folder / "page.html").read_text(encoding="utf-8"))
    text = template.substitute(
        title=html.escape(run.folder.name),
        top=_top(run),
        bottom=_bottom(run),
        data=json.dumps(_charts(run.points), separators=(",", ":")).replace("<", "\\u003c"),  # nothing ends the script
        uplot_css=(folder / "vendor/uPlot.min.css").read_text(encoding="utf-8"),
        uplot_js=(folder / "vendor/uPlot.iife.min.js").read_text(encoding="utf-8"),
    )
    path = run.folder / "report.html"
    try:
        write_whole(path, text)
    except OSError as error:
        raise UserError(f"{path} was not written: {error.strerror}") from None
    return path


def _top(run: Run) -> str:
    """The name of the run, and the few numbers that matter most: quality first, then speed."""
    facts = [
        run.description.get("started"),
        run.description.get("gpu") or "CPU",
        f"{run.points[-1]['step']:,.0f} steps",
    ]
    cards = []
    if best := results.best_of(run):
        cards.append((f"best {best[0]}", results.number(best[1]), f"at step {best[2]:,.0f}"))
    for name, title in results.SHOWN.items():
        value = results.over_run(run.points, name)
        if value is not None:
            cards.append((title, results.number(value), "last" if name == "train/loss" else "over the run"))
    boxes = "".join(
        f"<div><span>{html.escape(title)}</span><b>{html.escape(value)}</b><span>{html.escape(note)}</span></div>"
        for title, value, note in cards
    )
    line = html.escape(" · ".join(str(fact) for fact in facts if fact))
    return f"<h1>{html.escape(run.folder.name)}</h1><p class=facts>{line}</p><section class=cards>{boxes}</section>"


def _bottom(run: Run) -> str:
    """What differs from the defaults, all values, and the files of the run."""
    settings = {key: json.dumps(value, ensure_ascii=False) for key, value in results.changed_settings(run).items()}
    parts = [_table("settings of the workload, and what differs from the defaults", settings)]
    parts.append(_table("over the whole run", dict(results.describe(run))))
    folded = {"command": shlex.join(["python", *map(str, run.description.get("command", ()))])}
    for path in (*results.numbered(run.folder, "config*.yaml"), *results.numbered(run.folder, "run*.json")):
        folded[path.name] = path.read_text(encoding="utf-8", errors="replace")
    for name, text in folded.items():
        parts.append(f"<details><summary>{html.escape(name)}</summary><pre>{html.escape(text)}</pre></details>")
    return "".join(parts)


def _table(title: str, lines: dict[str, str]) -> str:
    rows = "".join(f"<tr><td>{html.escape(name)}<td>{html.escape(value)}" for name, value in lines.items())
    return f"<div class=wide><table><thead><tr><td>{html.escape(title)}<td><tbody>{rows}</table></div>"


def _charts(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Loss and metrics, the learning rate, then all others: the scalars of a group that have one unit are a chart."""
    names = results.scalars_of(points)
    drawn: dict[str, list[str]] = {}
    for name in sorted(names, key=lambda name: (not name.startswith(("train/loss", "val/")), name != "train/lr")):
        group = re.sub(r"\d+$", "", name.partition("/")[0])  # gpu0 and gpu1 together
        unit = next((unit for end, unit in UNITS.items() if name.endswith(f"_{end}")), "")
        title = f"{group}, {unit}" if unit else name
        drawn.setdefault("loss" if name.endswith("/loss") else title, []).append(name)
    rows = _by_step(points, names)
    starts = {point.get("part", 1): point["step"] - point.get("steps", 0) for point in reversed(points)}
    shared = {"x": [row["step"] for row in rows], "resumed_at": sorted(starts.values())[1:]}
    return [
        {**shared, "title": title, "series": [_series(name, (row.get(name) for row in rows)) for name in of_chart]}
        for title, of_chart in drawn.items()
    ]


def _by_step(points: Sequence[Point], names: Sequence[str]) -> list[Point]:
    """{"step": ..., name: value} for each step, or for several neighbouring steps if the page would grow too large."""
    by_step: dict[float, list[Point]] = {}
    for point in points:
        by_step.setdefault(point["step"], []).append(point)
    steps = list(by_step)
    n_together = ceil(len(steps) / min(MAX_POINTS, MAX_VALUES // (len(names) + 1)))
    rows = []
    for begin in range(0, len(steps), n_together):
        together = steps[begin : begin + n_together]
        bucket = [point for step in together for point in by_step[step]]
        row = {"step": together[-1]}
        for name in names:
            if having := [point for point in bucket if name in point]:
                row[name] = results.combine(having, name)
        rows.append(row)
    return rows


def _series(label: str, values: Iterable[float | None]) -> dict[str, Any]:
    known = [None if value is None or not isfinite(value) else float(f"{value:.4g}") for value in values]
    return {"label": label, "values": known}
