"""What a run did, read from the files that it left: values of the whole run, verdicts, and how runs differ.

It does not import torch, so `python report.py` answers at once.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from math import isnan, prod
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

from fastgpu.run.folder import numbered, read_config, read_description, read_settings

Point = Mapping[str, float]
"""A line of metrics.jsonl: step, time_s, part, the sums of a `Throughput` and {name of a scalar: value}. Such a name is
`group/name_unit`."""
OverRun = Literal["seconds", "steps", "fresh_rows", "minimum", "maximum", "last"]
"""How the points of a scalar become one value of the run. A field of `Throughput` is the weight of a mean: rows per
second weighted by seconds are all rows over all seconds."""
Table = Sequence[Sequence[str]]
"""Lines of a table; the first one holds the titles of the columns."""

WAIT_PCT = 10.0
"""A run that waits for data for a larger part of its time is input-bound; training warns at the same share."""
IDLE_PCT = 20.0
"""A GPU that is idle for a larger part of the time, although it is fed, deserves a look."""


UNITS = {"pct": "%", "rows_per_s": "rows/s", "ms": "ms", "gib": "GiB", "mb_per_s": "MB/s", "w": "W", "c": "°C"}
"""{end of the name of a scalar: its unit}"""


class Best(NamedTuple):
    """The best value of the metric that decides which checkpoint is kept."""

    metric: str
    value: float
    step: float


class Verdict(NamedTuple):
    """Whether a run is fed."""

    kind: Literal["fed", "idle", "waits"]
    text: str


# ---------------------------------------------------------------------------------------------- what a run left


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """The points of metrics.jsonl. A last line that was cut off is left out, and so are points that a resumed run
    trained again because they came after its checkpoint.

    The first point of a part has `counts` if it is not only about the start: the others are about less than a pool, so
    it holds the only waiting for rows.
    """
    try:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    points: list[dict[str, float]] = []
    part = 1.0
    for line in lines:
        with suppress(ValueError, TypeError, AttributeError, KeyError, RecursionError):  # it is no point
            point = json.loads(line)
            point["step"] + 0
            if point.get("part", 1) != part:
                part = point["part"]
                resumed_at = point["step"] - point.get("steps", 0)
                points = [earlier for earlier in points if earlier["step"] <= resumed_at]
            points.append(point)
    config = read_config(folder)
    sizes = [config.get("data.pool_batches"), config.get("data.batch_size")]
    pool_rows = prod(size if isinstance(size, int) else 0 for size in sizes)
    for _, group in groupby(points, lambda point: point.get("part", 1)):
        first, *others = group
        if sum(point.get("fresh_rows", 0) for point in others) < pool_rows:
            first["counts"] = 1.0
    return points


def read_run(folder: Path) -> dict[str, Any]:
    """The newest run.json of a run; empty if there is none."""
    paths = numbered(folder, "run*.json")
    return read_description(paths[-1]) if paths else {}


# ---------------------------------------------------------------------------------------------- one value of a run


def over_run(name: str) -> OverRun:
    """How the points of a scalar become one value of the run."""
    if name.startswith(("val/", "train/loss", "train/lr")):
        return "last"
    if "_min_" in name:
        return "minimum"
    if "_peak_" in name:
        return "maximum"
    if name == "train/step_ms":
        return "steps"
    return "fresh_rows" if name == "data/echo" else "seconds"


def steady(points: Iterable[Point], name: str) -> list[Point]:
    """The points with this scalar. Speeds and shares of the time are without the first one of each part, which holds
    what happens only at the start, unless it `counts` (see `read_metrics`); a last value and a peak are those of all
    points."""
    logged = [point for point in points if name in point]
    if over_run(name) in ("last", "maximum"):
        return logged
    first = {point.get("part", 1): point for point in reversed(logged)}
    return [point for point in logged if "counts" in point or point is not first[point.get("part", 1)]] or logged


def combine(points: Sequence[Point], name: str) -> float:
    """One value of several points that have this scalar. A mean is weighted (see `OverRun`): it is a sum divided by a
    sum. A point without the weight counts as 1."""
    values = [point[name] for point in points]
    how = over_run(name)
    if how == "last":
        return values[-1]
    if how == "minimum":
        return min(values)
    if how == "maximum":
        return max(values)
    weights = [point.get(how, 1.0) for point in points]
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


def summary(points: Sequence[Point]) -> dict[str, float]:
    """{name of a scalar: its value over the whole run}"""
    return {name: combine(steady(points, name), name) for name in scalars_of(points)}


def scalars_of(points: Iterable[Point]) -> list[str]:
    """The names of all scalars that were logged, in the order in which they came."""
    return list(dict.fromkeys(name for point in points for name in point if "/" in name))


def charts(names: Iterable[str]) -> dict[str, list[str]]:
    """{title of a chart: the scalars in it}: those of a group that have one unit; a scalar without a unit is alone."""
    drawn: dict[str, list[str]] = {}
    for name in names:
        group = re.sub(r"\d+$", "", name.partition("/")[0])  # gpu0 and gpu1 together
        unit = next((unit for end, unit in UNITS.items() if name.endswith(f"_{end}")), "")
        title = f"{group}, {unit}" if unit else name
        drawn.setdefault("loss" if name.endswith("/loss") else title, []).append(name)
    return drawn


def best(points: Iterable[Point], folder: Path) -> Best | None:
    """The best value of the metric that counts; of equal ones the first, whose checkpoint is the best one."""
    metric, direction = read_run(folder).get("best", ("", ""))
    name = f"val/{metric}"
    sign = -1 if direction == "higher" else 1
    scored = [point for point in points if name in point and not isnan(point[name])]
    point = min(scored, key=lambda point: sign * point[name], default=None)
    return Best(metric, point[name], point["step"]) if point else None


# ---------------------------------------------------------------------------------------------- verdicts


def run_verdict(points: Sequence[Point]) -> Verdict | None:
    """Whether the run was fed; None if nothing was logged about it."""
    values = summary(points)
    if "data/wait_pct" not in values:
        return None
    return feed_verdict(values["data/wait_pct"], values.get("gpu0/util_pct"))


def feed_verdict(wait_pct: float, util_pct: float | None = None) -> Verdict:
    """Whether a run is fed, in one line. wait_pct: its data wait. util_pct: GPU-Util, if there is a GPU."""
    if wait_pct > WAIT_PCT:
        text = f"input-bound: {wait_pct:.0f} % of the time was spent waiting for data; run `python diagnose.py`"
        return Verdict("waits", text)
    if util_pct is not None and util_pct < 100 - IDLE_PCT:
        idle_pct = 100 - util_pct
        return Verdict(
            "idle", f"fed, but the GPU was idle {idle_pct:.0f} % of the time; `python diagnose.py` tells why"
        )
    return Verdict("fed", f"fed: {wait_pct:.1f} % of the time was spent waiting for data")


# ---------------------------------------------------------------------------------------------- tables


def table(points: Sequence[Point]) -> str:
    """The summary for a terminal; empty if nothing was logged."""
    return as_text([[f"  {name}", f"{number(value):>10}"] for name, value in summary(points).items()])


def differing_settings(runs: Mapping[str, Path]) -> Table:
    """The keys of the config that differ between runs, or between the parts of a run, but not the names of the runs.

    runs: {label: folder}. A cell of a run whose parts differ is `64, then 128`.
    """
    parts_of = [[read_settings(path) for path in numbered(folder, "config*.yaml")] for folder in runs.values()]
    keys = dict.fromkeys(key for parts in parts_of for config in parts for key in config)
    lines = [["setting", *runs]]
    for key in keys:
        cells = []
        for parts in parts_of:
            values = [json.dumps(config[key], ensure_ascii=False) if key in config else "-" for config in parts]
            cells.append(", then ".join(value for value, _ in groupby(values)) or "-")
        if (len(set(cells)) > 1 or ", then " in cells[0]) and key != "run.name":
            lines.append([key, *cells])
    return lines


def differing_values(runs: Mapping[str, Path]) -> Table:
    """The summaries of several runs side by side: `value [minimum, median, maximum of the points]`. runs: {label:
    folder}. A mean over the run is also shown as a multiple of that of the first run."""
    lines = [["value over the run [minimum, median, maximum of its points]", *runs]]
    points_of = [read_metrics(folder) for folder in runs.values()]
    found = [best(points, run) for points, run in zip(points_of, runs.values(), strict=True)]
    if any(found):
        lines.append(["best", *(f"{b.metric} {number(b.value)} at step {b.step:,.0f}" if b else "-" for b in found)])
    for name in scalars_of(point for points in points_of for point in points):
        lines.append([name, *_side_by_side([steady(points, name) for points in points_of], name)])
    return lines


def _side_by_side(points_of: Sequence[Sequence[Point]], name: str) -> list[str]:
    """The cells of one scalar; points_of: the points of each run."""
    has_ratio = over_run(name) not in ("last", "minimum", "maximum")
    cells: list[str] = []
    first = 0.0
    for points in points_of:
        if not points:
            cells.append("-")
            continue
        values = [point[name] for point in points]
        value = combine(points, name)
        ratio = f" = {value / first:.2f} x" if first and has_ratio else ""
        spread = ", ".join(map(number, (min(values), median(values), max(values))))
        cells.append(f"{number(value)}{ratio} [{spread}]")
        first = first or value
    return cells


def as_text(lines: Table) -> str:
    """A table for a terminal."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def number(value: float) -> str:
    """A value with three figures or, above 100, without decimals."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
