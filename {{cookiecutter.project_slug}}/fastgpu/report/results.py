"""The values of runs, from the files in their folders. No torch is imported, so report.py answers without delay."""

import json
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from math import isfinite, isnan, nan
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from fastgpu.process.launch import say
from fastgpu.process.yaml_text import YamlLoader
from fastgpu.report.ledger import Point, account, goodput, read_process

WEIGHTS = {"train/step_ms": "steps", "data/echo": "fresh_rows"}
"""{scalar: the sum that weights its mean}; `seconds` for others: rows per second are all rows over all seconds."""
SPEED = ("train/trained_rows_per_s", "data/wait_pct", "gpu0/util_pct", "train/loss")
"""Scalars that are shown behind the quality."""


class Run(NamedTuple):
    """The content of a run's folder."""

    folder: Path
    points: list[Point]
    config: dict[str, Any]
    """{dotted key: value} of the newest config.yaml"""
    description: dict[str, Any]
    """The newest run.json"""
    ledger: dict[str, float]
    """See `account`."""

    @property
    def best(self) -> tuple[str, str]:
        """The metric that decides which checkpoint is the best one, and its direction. Empty if they are not known."""
        best = self.description.get("best")
        return (str(best[0]), str(best[1])) if isinstance(best, list) and len(best) == 2 else ("", "")


def read_run(folder: Path) -> Run:
    """Read the folder of a run, without the points after a checkpoint that a resumed run trained again."""
    points: list[Point] = []
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines() if path.is_file() else []
    read = [point for point in map(_read_point, lines) if point]
    for point in read:
        if points and point["part"] != points[-1]["part"]:
            resumed_at = point["step"] - point.get("steps", 0)
            points = [earlier for earlier in points if earlier["step"] <= resumed_at]
        points.append(point)
    if n_others := len(lines) - len(read):
        say(f"warning: {n_others} lines of {path} are no points, such as one that a kill has cut", sys.stderr)
    config: dict[str, Any] = {}
    for name, value in next(_read_all(folder, "config*.yaml"), {}).items():
        is_section = isinstance(value, dict)
        config |= {f"{name}.{key}": each for key, each in value.items()} if is_section else {name: value}
    descriptions = [*_read_all(folder, "run*.json")]
    processes = []
    for description in descriptions:
        with suppress(Exception):  # any kind of error: a person may have edited the file
            processes.append(read_process(description))
    return Run(folder, points, config, descriptions[0] if descriptions else {}, account(read, processes))


def _read_point(line: bytes) -> Point | None:
    """The numbers of a line of metrics.jsonl. None: it has no step, or is no JSON."""
    with suppress(AttributeError, LookupError, OverflowError, RecursionError, ValueError):
        numbers = {name: value for name, value in json.loads(line).items() if isinstance(value, int | float)}
        point = {name.encode(errors="replace").decode(): float(value) for name, value in numbers.items()}
        return point if isfinite(point["step"]) and isfinite(point["part"]) else None
    return None


def _read_all(folder: Path, pattern: str) -> Iterator[dict[str, Any]]:
    """The undamaged files that the parts of a run wrote, such as config-2.yaml, the newest first."""
    for path in sorted(folder.glob(pattern), key=lambda path: (len(path.name), path.name), reverse=True):
        with suppress(Exception):  # any kind of error: the file may be damaged
            text = path.read_text(encoding="utf-8") if path.is_file() else ""  # a fifo would never end
            content = YamlLoader(text).get_single_data()  # JSON is YAML, too
            if isinstance(content, dict):
                text = json.dumps(content, default=str, skipkeys=True, ensure_ascii=False)  # such as dates
                yield dict(json.loads(text.encode(errors="replace")))


def over_run(points: Sequence[Point], name: str) -> float:
    """A scalar over the whole run: the last metric, loss or learning rate; an extreme; the total time of saving; or a
    weighted mean. A mean leaves out the first point of each part, which includes the start, if there are other points.
    At least one point must have the scalar."""
    logged = [point for point in points if name in point]
    if name.startswith(("val/", "train/loss", "train/lr")):
        return logged[-1][name]
    if name == "run/save_s":
        return sum(point[name] for point in logged)
    if "_min_" in name:
        return min(point[name] for point in logged)
    if "_peak_" in name:
        return max(point[name] for point in logged)
    later = [after for before, after in pairwise(logged) if after["part"] == before["part"]] or logged
    weights = [point.get(WEIGHTS.get(name, "seconds"), 1) for point in later]
    total = sum(point[name] * weight for point, weight in zip(later, weights, strict=True))
    return total / (sum(weights) or 1)


def summary(run: Run) -> dict[str, float]:
    """{name: value}: the best value of the metric that counts (of equal ones the last without a higher loss, as for
    checkpoints), then each scalar over the whole run: quality first, then speed, then the rest."""
    metric, direction = run.best
    name, sign = f"val/{metric}", 1 if direction == "higher" else -1
    has_sets = isinstance(run.config.get("data.val"), dict)  # then the metric begins with the name of one
    loss = f"val/{metric.partition('/')[0]}/loss" if has_sets else "val/loss"
    scored = [point for point in reversed(run.points) if not isnan(point.get(name, nan))]
    best = max(scored, key=lambda point: (sign * point[name], -point.get(loss, 0.0)), default=None)
    logged = dict.fromkeys(name for point in run.points for name in point if "/" in name)
    first = [name for name in logged if name.startswith("val/")] + [name for name in SPEED if name in logged]
    whole = {tag: over_run(run.points, tag) for tag in (*first, *logged)}
    return ({f"best {metric}": best[name], "at step": best["step"]} if best else {}) | whole


def by_metric(runs: Iterable[Run]) -> list[list[Run]]:
    """Groups of runs with the same metric. Runs of different groups cannot be compared."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault(run.best, []).append(run)
    return [*groups.values()]


def facts(run: Run) -> dict[str, Any]:
    """{name: value} of everything that --sort takes: `summary`, the steps, the goodput, the settings."""
    spent = {"goodput": goodput(run.ledger)} if run.ledger else {}
    return run.config | summary(run) | {"steps": int(run.points[-1]["step"])} | spent


def compare(runs: Sequence[Run], text_of: Callable[[float], str], sort: str = "") -> list[list[str]]:
    """Titles, then a line for each run: its best metric, the settings that differ, and its speed.

    Runs of one metric are together, the best run first; or, if `sort` names one of `facts`, the run with the lowest
    value.
    """
    # The settings that differ may explain why one run is better. Its name and folder do not.
    every = dict.fromkeys(key for run in runs for key in run.config if key == "run.seed" or not key.startswith("run."))
    differing = [key for key in every if len({json.dumps(run.config.get(key)) for run in runs}) > 1]
    lines = []
    for group in by_metric(runs):
        metric, direction = group[0].best
        sign = -1 if direction == "higher" and not sort else 1
        columns = [f"best {metric}", sort, *differing, *SPEED, "goodput", "steps"]
        ranked = []
        for run in group:
            values = facts(run)
            line = {"run": str(run.folder)}
            for name in columns:
                if name in values:
                    line[name] = setting_text(values[name]) if name in run.config else text_of(values[name])
            ranked.append((_rank(values.get(sort or columns[0]), sign), line))
        lines += [line for _, line in sorted(ranked, key=itemgetter(0))]
    names = list(dict.fromkeys(name for line in lines for name in line))
    return [names, *([line.get(name, "-") for name in names] for line in lines)]


def _rank(value: Any, sign: int) -> tuple[int, float, str]:
    """Numbers come before texts, and these before runs without a value."""
    if isinstance(value, int | float) and not isnan(value):
        return 0, sign * value, ""
    return (1, 0.0, value) if isinstance(value, str) else (2, 0.0, "")


def setting_text(value: Any) -> str:
    """A value of the config as a person writes it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def as_text(lines: Sequence[Sequence[str]], width: int | None = None) -> str:
    """A table for a terminal. width: of the terminal, or None; columns that do not fit are named below the table."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    ends = [end - 2 for end in accumulate(each + 2 for each in widths)]
    n_shown = len(ends) if width is None else max(1, bisect_right(ends, width))
    padded = [[f"{cell:<{width}}" for cell, width in zip(line[:n_shown], widths, strict=False)] for line in lines]
    left_out = [f"(not shown: {', '.join(lines[0][n_shown:])}; --csv has all)"] if n_shown < len(ends) else []
    return "\n".join([*("  ".join(line).rstrip() for line in padded), *left_out])


def number(value: float) -> str:
    """A value with four figures or, above 1000, without decimals."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
