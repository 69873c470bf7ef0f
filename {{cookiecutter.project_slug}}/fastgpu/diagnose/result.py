"""What was found out: as a table, as bars, and as diagnosis.json, which later runs read."""

import html
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fastgpu.diagnose.preflight import Finding
from fastgpu.diagnose.verdict import MEANING, Measured, Rounds, Verdict
from fastgpu.process.launch import UserError, warn
from fastgpu.telemetry.ceiling import FILE, feed_identity, step_identity

LOOP = "the training loop"


class Subject(NamedTuple):
    """The training that was diagnosed."""

    world: str
    machine: Mapping[str, Any]
    """`World.identity` and `row_bytes`."""
    config: Mapping[str, Any]
    """{dotted key: value}, without `auto`."""


def ceilings(m: Measured) -> dict[str, Rounds]:
    """{name: timing} of each part, from the device back to the storage, and of the loop."""
    timings = {
        "compute": m.compute,
        "copy and compute": m.copy,
        "supply from the page cache": m.cached,
        "supply": m.supply,
        LOOP: m.loop,
    }
    return {name: timing for name, timing in timings.items() if timing}


def table(title: str, m: Measured, verdict: Verdict) -> str:
    """All numbers and the verdict, for a terminal."""
    ratio = m.feed_ratio
    lines = [title, f"  {'each part alone':<28}{'ms per step':>12}{'rows/s':>12}{'of compute':>12}"]
    for name, timing in ceilings(m).items():
        rows_per_s = m.batch_size / timing.median
        speed = m.compute.median / timing.median
        spread_pct = 100 * timing.spread
        lines.append(
            f"  {name:<28}{1000 * timing.median:>12.3f}{rows_per_s:>12,.0f}{speed:>10.2f} x  +-{spread_pct:.0f} %"
        )
    lines.append(f"  {'transform, part of compute':<28}{1000 * m.transform_s:>12.3f}")
    if m.busy_s is not None:
        lines.append(f"  {'device busy, part of compute':<28}{1000 * m.busy_s:>12.3f}")
    lines.append(f"feed ratio {ratio.median:.3f} [{min(ratio.values):.3f} to {max(ratio.values):.3f}]")
    lines.append(f"{verdict.cause}: {MEANING[verdict.cause]} ({verdict.why})")
    if verdict.cause != "COMPUTE":
        lines.append(f"  change    {verdict.change}")
    if verdict.gain > 1:
        lines.append(f"  gain      {verdict.gain:.2f} x the speed, predicted; confidence: {verdict.confidence}")
    if verdict.see_also:
        lines.append(f"  see also  {verdict.see_also}")
    return "\n".join(lines)


def bars_page(title: str, m: Measured) -> str:
    """The parts as bars of rows per second: an HTML page that needs no network."""
    left = 250
    width = 900
    rows_per_s = {name: m.batch_size / timing.median for name, timing in ceilings(m).items()}
    px_per_unit = (width - left - 150) / max(rows_per_s.values())
    shapes = [f'<text x="10" y="30" font-size="17" font-weight="600">{html.escape(title)}</text>']
    y = 60
    for name, speed in rows_per_s.items():
        length = speed * px_per_unit
        color = "#dc2626" if name == LOOP else "#2563eb"
        shapes.append(
            f'<text x="{left - 10}" y="{y + 18}" text-anchor="end">{name}</text>'
            f'<rect x="{left}" y="{y}" width="{length:.1f}" height="26" fill="{color}"/>'
            f'<text x="{left + length + 8:.1f}" y="{y + 18}">{speed:,.0f} rows/s</text>'
        )
        y += 38
    style = f"max-width: {width}px; width: 100%; font: 14px system-ui; fill: #0f172a"
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title>"
        f'<svg viewBox="0 0 {width} {y}" style="{style}" role="img">{"".join(shapes)}</svg></html>\n'
    )


def as_json(subject: Subject, m: Measured, verdict: Verdict, findings: Sequence[Finding]) -> dict[str, Any]:
    """Everything as JSON values. A later run reads the keys from `machine` to `summary` (telemetry/ceiling.py)."""
    date = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    summary = (
        f"diagnose.py, {date}: {verdict.cause}: {MEANING[verdict.cause]} ({verdict.why}); change: {verdict.change}, "
        f"{verdict.gain:.2f} x the speed predicted"
    )
    parts = {}
    for name, timing in ceilings(m).items():
        rows_per_s = m.batch_size / timing.median
        parts[name] = {"step_s": timing.median, "rounds": timing.values, "rows_per_s": rows_per_s}
    return {
        "date": date,
        "world": subject.world,
        "machine": dict(subject.machine),
        "step": step_identity(subject.config),
        "feed": feed_identity(subject.config),
        "compute_rows_per_s": m.batch_size / m.compute.median,
        "is_conclusive": verdict.cause != "INCONCLUSIVE",
        "summary": summary,
        "feed_ratio": m.feed_ratio.median,
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
