"""What a run did, read from the files that it left. It does not import torch, so `python report.py` answers at once."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from math import inf, isnan, nan
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from fastgpu.process.config_loader import keys

Point = dict[str, float]
"""A line of metrics.jsonl: step, time_s, part, the sums of a `Throughput` and {name of a scalar: value}. Such a name is
`group/name_unit`."""
Table = Sequence[Sequence[str]]
"""Lines of a table; the first one holds the titles of the columns."""
WEIGHTS = {"train/step_ms": "steps", "data/echo": "fresh_rows"}
"""{scalar: the sum that weights its mean}. For all others it is `seconds`: rows per second are all rows over all
seconds."""
SPEED = {
    "train/trained_rows_per_s": "trained rows/s",
    "data/wait_pct": "% data wait",
    "gpu0/util_pct": "% GPU-Util",
    "train/loss": "train/loss",
}
"""{scalar that is shown behind the quality: its title}"""


class Run(NamedTuple):
    """What the folder of a run holds."""

    folder: Path
    points: list[Point]
    config: dict[str, Any]
    """{dotted key: value} of the newest config.yaml"""
    description: dict[str, Any]
    """The newest run.json"""


def read_run(folder: Path) -> Run:
    """Points that a resumed run trained again, because they came after its checkpoint, are left out."""
    points: list[Point] = []
    path = folder / "metrics.jsonl"
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with suppress(ValueError):  # a line that a kill has cut
            point = json.loads(line)
            if points and point["part"] != points[-1]["part"]:
                resumed_at = point["step"] - point.get("steps", 0)
                points = [earlier for earlier in points if earlier["step"] <= resumed_at]
            points.append(point)
    config: dict[str, Any] = {}
    for name, value in _read_newest(folder, "config*.yaml").items():
        is_section = isinstance(value, dict)
        config |= {f"{name}.{key}": each for key, each in value.items()} if is_section else {name: value}
    return Run(folder, points, config, _read_newest(folder, "run*.json"))


def _read_newest(folder: Path, pattern: str) -> dict[str, Any]:
    """The newest whole file of those that the parts of a run wrote, such as config-2.yaml. Empty if there is none."""
    for path in sorted(folder.glob(pattern), key=lambda path: (len(path.name), path.name), reverse=True):
        with suppress(OSError, ValueError, yaml.YAMLError):
            content = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON is YAML, too
            if isinstance(content, dict):
                return content
    return {}


def over_run(points: Sequence[Point], name: str) -> float | None:
    """A scalar over the whole run: the last metric, loss or learning rate; the extreme of a minimum or peak; or a mean,
    which is a sum divided by a sum. A mean is without the first point of each part, which holds what happens only at
    the start, if there are others."""
    logged = [point for point in points if name in point]
    if not logged:
        return None
    if name.startswith(("val/", "train/loss", "train/lr")):
        return logged[-1][name]
    if "_min_" in name:
        return min(point[name] for point in logged)
    if "_peak_" in name:
        return max(point[name] for point in logged)
    later = [after for before, after in pairwise(logged) if after["part"] == before["part"]] or logged
    weights = [point.get(WEIGHTS.get(name, "seconds"), 1) for point in later]
    total = sum(point[name] * weight for point, weight in zip(later, weights, strict=True))
    return total / (sum(weights) or 1)


def best_of(run: Run) -> tuple[str, float, float] | None:
    """(name, best value, step) of the metric that counts: of equal values the first, whose checkpoint is the best."""
    metric, direction = run.description.get("best", ("", ""))
    sign = -1 if direction == "higher" else 1
    scored = [point for point in run.points if not isnan(point.get(f"val/{metric}", nan))]
    best = min(scored, key=lambda point: sign * point[f"val/{metric}"], default=None)
    return (metric, best[f"val/{metric}"], best["step"]) if best else None


def changed_settings(run: Run) -> dict[str, Any]:
    """{key: value} of what differs from the defaults, and of all settings of the workload, but not names of files."""
    defaults = {key: field.get_default() for key, field in keys().items() if not field.is_required()}
    return {
        key: value
        for key, value in run.config.items()
        if key.startswith("model.") or (key in defaults and value != defaults[key] and not key.startswith("run."))
    }


def describe(run: Run) -> Iterator[tuple[str, str]]:
    """(name, value): quality first, then speed, then the rest."""
    if best := best_of(run):
        yield f"best {best[0]}", f"{number(best[1])} at step {best[2]:,.0f}"
    logged = dict.fromkeys(name for point in run.points for name in point if "/" in name)
    metrics = [name for name in logged if name.startswith("val/")]
    for name in dict.fromkeys([*metrics, *SPEED, *logged]):
        value = over_run(run.points, name)
        if value is not None:
            yield name, number(value)


def compare(runs: Sequence[Run], text_of: Callable[[float], str]) -> Table:
    """A line for each run: its metric, its speed and the settings that differ. The best run comes first."""
    best = [best_of(run) for run in runs]
    metrics = sorted({each[0] for each in best if each})
    sign = -1 if any("higher" in run.description.get("best", ()) for run in runs) else 1
    ranks = [sign * each[1] if each else inf for each in best]
    every = dict.fromkeys(key for run in runs for key in run.config if key == "run.seed" or not key.startswith("run."))
    differing = [key for key in every if len({json.dumps(run.config.get(key)) for run in runs}) > 1]
    speed = [name for name in SPEED if any(name in point for run in runs for point in run.points)]
    table = [["run", *(f"best {name}" for name in metrics), *(SPEED[name] for name in speed), "steps", *differing]]
    for place in sorted(range(len(runs)), key=ranks.__getitem__):
        run, its_best = runs[place], best[place]
        values = [its_best[1] if its_best and its_best[0] == name else None for name in metrics]
        values += [over_run(run.points, name) for name in speed]
        cells = ["-" if value is None else text_of(value) for value in values]
        settings = [setting_text(run.config.get(key, "-")) for key in differing]
        table.append([str(run.folder), *cells, f"{run.points[-1]['step']:.0f}", *settings])
    return table


def setting_text(value: Any) -> str:
    """A value of the config as one would write it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def as_text(lines: Table) -> str:
    """A table for a terminal."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [[f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)] for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in padded)


def number(value: float) -> str:
    """A value with four figures or, above 1000, without decimals."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
