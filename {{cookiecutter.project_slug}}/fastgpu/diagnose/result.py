"""What diagnose.py found: as a table, as a file beside the runs, and as what a later run knows of its own ceiling."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fastgpu.diagnose.plot import Bar
from fastgpu.diagnose.verdict import MEANING, Measured, Timing, Verdict

FILE = "diagnosis.json"
STEP_KEYS = (
    "workload",
    "data.batch_size",
    "optim.name",
    "optim.fused",
    "optim.accumulation_steps",
    "optim.clip_grad_norm",
    "train.precision",
    "train.channels_last",
    "train.compile",
    "dist.strategy",
)
STEP_SECTIONS = ("model", "augment", "recsys")
"""Keys that decide how long a step takes, beside the machine and the size of a row."""


def bars(m: Measured) -> list[tuple[str, Timing]]:
    """(name, its timing), in the order of the data's way back."""
    found = [
        ("compute", m.compute),
        ("copy and compute", m.copy),
        ("supply from the page cache", m.cached),
        ("supply", m.supply),
        ("the training loop", m.loop),
    ]
    return [(name, timing) for name, timing in found if timing]


def drawn(m: Measured) -> list[Bar]:
    """The same, as bars of rows/s."""
    return [
        Bar(
            name,
            m.batch_size / timing.step_s,
            f"{m.batch_size / timing.step_s:,.0f} rows/s",
            "#dc2626" if timing is m.loop else "#2563eb",
        )
        for name, timing in bars(m)
    ]


def table(head: str, m: Measured, v: Verdict) -> str:
    """For a terminal."""
    ratio = m.feed_ratio
    lines = [head, f"  {'each part alone':<28}{'ms a step':>10}{'rows/s':>12}{'of compute':>12}"]
    for name, timing in bars(m):
        times = m.compute.step_s / timing.step_s
        lines.append(
            f"  {name:<28}{1000 * timing.step_s:>10.3f}{m.batch_size / timing.step_s:>12,.0f}{times:>10.2f} x"
            f"  +-{100 * timing.spread:.0f} %"
        )
    lines.append(f"  of compute, the transform   {1000 * m.transform_s:>10.3f}")
    if m.busy_s is not None:
        lines.append(f"  of compute, device at work  {1000 * m.busy_s:>10.3f}")
    lines.append(f"feed ratio {ratio.step_s:.3f} [{min(ratio.rounds):.3f} to {max(ratio.rounds):.3f}]")
    lines.append(f"{v.cause}: {MEANING[v.cause]} ({v.why})")
    if v.cause != "COMPUTE":
        lines.append(f"  change   {v.change}")
    if v.gain > 1:
        lines.append(f"  gives    {v.gain:.2f} x the speed, predicted; certainty: {v.sure}")
    if v.also:
        lines.append(f"  also     {v.also}")
    return "\n".join(lines)


def as_json(world: str, config: Mapping[str, Any], m: Measured, v: Verdict, preflight: list[Any]) -> dict[str, Any]:
    """Everything, for programs."""
    ceilings = {
        name: {"step_s": timing.step_s, "rounds": timing.rounds, "rows_per_s": m.batch_size / timing.step_s}
        for name, timing in bars(m)
    }
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "world": world,
        "feed_ratio": m.feed_ratio.step_s,
        "compute_rows_per_s": m.batch_size / m.compute.step_s,
        "verdict": v._asdict(),
        "ceilings": ceilings,
        "measured": {
            "transform_s": m.transform_s,
            "busy_s": m.busy_s,
            "syncs": m.syncs,
            "cpu_share": m.cpu_share,
            "ranks_compute_s": m.ranks_compute_s,
            "ranks_supply_s": m.ranks_supply_s,
        },
        "preflight": preflight,
        "config": dict(config),
    }


def ceiling(folder: Path, world: str, config: Mapping[str, Any]) -> float | None:
    """Rows/s of `compute`, if the diagnosis in this folder is of such a step on such a machine; else None."""
    try:
        found = json.loads((folder / FILE).read_text(encoding="utf-8"))
        is_sure = found["verdict"]["cause"] != "INCONCLUSIVE"
        is_same = is_sure and found["world"] == world and _agree(found["config"], config, STEP_SECTIONS)
        return float(found["compute_rows_per_s"]) if is_same else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def of_run(run: Path) -> str:
    """The verdict beside a run's folder, in a line, if it is of just its data path and step; else empty."""
    try:
        found = json.loads((run.parent / FILE).read_text(encoding="utf-8"))
        tree = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
        config = {
            f"{name}.{key}": value
            for name, section in tree.items()
            if isinstance(section, dict)
            for key, value in section.items()
        } | {"workload": tree["workload"]}
        if not _agree(found["config"], config, (*STEP_SECTIONS, "data", "loader")):
            return ""
        v = Verdict(**found["verdict"])
        if v.cause == "INCONCLUSIVE":
            return ""
        return (
            f"diagnose.py, {found['date']}: {v.cause}: {MEANING[v.cause]} ({v.why}); change: {v.change}, "
            f"{v.gain:.2f} x the speed predicted"
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError):
        return ""


def _agree(one: Mapping[str, Any], other: Mapping[str, Any], sections: Sequence[str]) -> bool:
    keys = [key for key in other if key in STEP_KEYS or key.partition(".")[0] in sections]
    return all(one.get(key) == other[key] for key in keys)
