"""What was found out: as a table, as bars, and as diagnosis.json, which later runs read."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fastgpu.diagnose.plot import Bar
from fastgpu.diagnose.preflight import Finding
from fastgpu.diagnose.verdict import MEANING, Measured, Timing, Verdict
from fastgpu.process.launch import UserError, warn
from fastgpu.telemetry.ceiling import FILE, feed_identity, step_identity


class Subject(NamedTuple):
    """The training that was diagnosed."""

    world: str
    machine: Mapping[str, Any]
    """`World.identity` and `row_bytes`."""
    config: Mapping[str, Any]
    """{dotted key: value}, without `auto`."""


def ceilings(m: Measured) -> dict[str, Timing]:
    """{name: timing} of each part, from the device back to the storage, and of the loop."""
    timings = {
        "compute": m.compute,
        "copy and compute": m.copy,
        "supply from the page cache": m.cached,
        "supply": m.supply,
        "the training loop": m.loop,
    }
    return {name: timing for name, timing in timings.items() if timing}


def bars(m: Measured) -> list[Bar]:
    """The parts as bars of rows per second."""
    result = []
    for name, timing in ceilings(m).items():
        rows_per_s = m.batch_size / timing.step_s
        bar = Bar(name, rows_per_s, f"{rows_per_s:,.0f} rows/s")
        result.append(bar._replace(color="#dc2626") if timing is m.loop else bar)
    return result


def table(title: str, m: Measured, verdict: Verdict) -> str:
    """All numbers and the verdict, for a terminal."""
    ratio = m.feed_ratio
    lines = [title, f"  {'each part alone':<28}{'ms per step':>12}{'rows/s':>12}{'of compute':>12}"]
    for name, timing in ceilings(m).items():
        rows_per_s = m.batch_size / timing.step_s
        speed = m.compute.step_s / timing.step_s
        spread_pct = 100 * timing.spread
        lines.append(
            f"  {name:<28}{1000 * timing.step_s:>12.3f}{rows_per_s:>12,.0f}{speed:>10.2f} x  +-{spread_pct:.0f} %"
        )
    lines.append(f"  {'transform, part of compute':<28}{1000 * m.transform_s:>12.3f}")
    if m.busy_s is not None:
        lines.append(f"  {'device busy, part of compute':<28}{1000 * m.busy_s:>12.3f}")
    lines.append(f"feed ratio {ratio.value:.3f} [{min(ratio.rounds):.3f} to {max(ratio.rounds):.3f}]")
    lines.append(f"{verdict.cause}: {MEANING[verdict.cause]} ({verdict.why})")
    if verdict.cause != "COMPUTE":
        lines.append(f"  change    {verdict.change}")
    if verdict.gain > 1:
        lines.append(f"  gain      {verdict.gain:.2f} x the speed, predicted; confidence: {verdict.confidence}")
    if verdict.see_also:
        lines.append(f"  see also  {verdict.see_also}")
    return "\n".join(lines)


def as_json(subject: Subject, m: Measured, verdict: Verdict, findings: Sequence[Finding]) -> dict[str, Any]:
    """Everything as JSON values. A later run reads the keys from `machine` to `summary` (telemetry/ceiling.py)."""
    date = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    parts = {}
    for name, timing in ceilings(m).items():
        rows_per_s = m.batch_size / timing.step_s
        parts[name] = {"step_s": timing.step_s, "rounds": timing.rounds, "rows_per_s": rows_per_s}
    return {
        "date": date,
        "world": subject.world,
        "machine": dict(subject.machine),
        "step": step_identity(subject.config),
        "feed": feed_identity(subject.config),
        "compute_rows_per_s": m.batch_size / m.compute.step_s,
        "is_conclusive": verdict.cause != "INCONCLUSIVE",
        "summary": _summary(verdict, date),
        "feed_ratio": m.feed_ratio.value,
        "verdict": verdict._asdict(),
        "ceilings": parts,
        "measured": {
            "transform_s": m.transform_s,
            "busy_s": m.busy_s,
            "syncs": m.syncs,
            "cpu_share": m.cpu_share,
            "ranks_compute_s": m.ranks_compute_s,
            "ranks_supply_s": m.ranks_supply_s,
        },
        "preflight": [finding._asdict() for finding in findings],
        "config": dict(subject.config),
    }


def _summary(verdict: Verdict, date: str) -> str:
    """The verdict in one line, for the report of a run."""
    return (
        f"diagnose.py, {date}: {verdict.cause}: {MEANING[verdict.cause]} ({verdict.why}); change: {verdict.change}, "
        f"{verdict.gain:.2f} x the speed predicted"
    )


def keep(folder: Path, numbers: Mapping[str, Any]) -> None:
    """Write diagnosis.json for later runs. It is no error if that fails."""
    try:
        save(folder / FILE, lambda path: path.write_text(json.dumps(numbers, indent=2)))
    except UserError as error:
        warn(f"later runs will not know this diagnosis: {error}")


def save(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` with the path, whose folder exists by then. Raises UserError if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror})") from None
