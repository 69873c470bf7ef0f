"""What a run did, read from the files that it left. It does not import torch, so `python report.py` answers at once."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from math import inf, isfinite, isnan, nan
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from fastgpu.process.config_loader import YamlLoader, keys
from fastgpu.process.launch import say
from fastgpu.report.ledger import Point, account, goodput, read_process

WEIGHTS = {"train/step_ms": "steps", "data/echo": "fresh_rows"}
"""{scalar: the sum that weights its mean}; `seconds` for others: rows per second are all rows over all seconds."""
SPEED = ("train/trained_rows_per_s", "data/wait_pct", "gpu0/util_pct", "train/loss")
"""Scalars that are shown behind the quality."""


class Run(NamedTuple):
    """What the folder of a run holds."""

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
    """Points that a resumed run trained again, because they came after its checkpoint, are left out."""
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
        with suppress(Exception):  # of many kinds: a person may write anything
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
    """The whole files of those that the parts of a run wrote, such as config-2.yaml, the newest one first."""
    for path in sorted(folder.glob(pattern), key=lambda path: (len(path.name), path.name), reverse=True):
        with suppress(Exception):  # of many kinds: whatever the bytes have become
            text = path.read_text(encoding="utf-8") if path.is_file() else ""  # a fifo would never end
            content = YamlLoader(text).get_single_data()  # JSON is YAML, too
            if isinstance(content, dict):
                text = json.dumps(content, default=str, skipkeys=True, ensure_ascii=False)  # such as dates
                yield dict(json.loads(text.encode(errors="replace")))


def over_run(points: Sequence[Point], name: str) -> float:
    """A scalar over the whole run: the last metric, loss or learning rate; an extreme; the time of saving; or a mean,
    which is a sum divided by a sum. A mean is without the first point of each part, which holds what happens only at
    the start, if there are others. Some point has the scalar."""
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
    scored = [point for point in reversed(run.points) if not isnan(point.get(name, nan))]
    best = max(scored, key=lambda point: (sign * point[name], -point.get("val/loss", 0.0)), default=None)
    logged = dict.fromkeys(name for point in run.points for name in point if "/" in name)
    first = [name for name in logged if name.startswith("val/")] + [name for name in SPEED if name in logged]
    whole = {tag: over_run(run.points, tag) for tag in (*first, *logged)}
    return ({f"best {metric}": best[name], "at step": best["step"]} if best else {}) | whole


def changed_settings(run: Run) -> dict[str, Any]:
    """{key: value} of what differs from the defaults, and of all settings of the workload, but not names of files."""
    defaults = {key: field.get_default() for key, field in keys().items() if not field.is_required()}
    differs = {key for key, value in run.config.items() if value != defaults.get(key, value)}
    differs -= {"run.name", "run.folder"}
    return {key: value for key, value in run.config.items() if key in differs or key.startswith("model.")}


def compare(runs: Sequence[Run], text_of: Callable[[float], str]) -> list[list[str]]:
    """Titles, then a line for each run, the best one first: its metric, its speed and the settings that differ."""
    every = dict.fromkeys(key for run in runs for key in run.config if key == "run.seed" or not key.startswith("run."))
    differing = [key for key in every if len({json.dumps(run.config.get(key)) for run in runs}) > 1]
    ranked = []
    for run in runs:
        metric, direction = run.best
        values = summary(run)
        line = {"run": str(run.folder)}
        line |= {name: text_of(values[name]) for name in (f"best {metric}", *SPEED) if name in values}
        line |= {"goodput": text_of(goodput(run.ledger))} if run.ledger else {}
        line["steps"] = f"{run.points[-1]['step']:.0f}"
        line |= {key: setting_text(run.config[key]) for key in differing if key in run.config}
        sign = -1 if direction == "higher" else 1
        ranked.append((sign * values.get(f"best {metric}", sign * inf), line))
    lines = [line for _, line in sorted(ranked, key=itemgetter(0))]
    names = list(dict.fromkeys(name for line in lines for name in line))
    return [names, *([line.get(name, "-") for name in names] for line in lines)]


def setting_text(value: Any) -> str:
    """A value of the config as one would write it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def as_text(lines: Sequence[Sequence[str]]) -> str:
    """A table for a terminal."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [[f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)] for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in padded)


def number(value: float) -> str:
    """A value with four figures or, above 1000, without decimals."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
