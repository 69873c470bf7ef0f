"""What was found out: as a table, and as JSON."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from fastgpu.diagnose.preflight import Finding
from fastgpu.diagnose.verdict import MEANING, Measured, Rounds, Verdict

LOOP = "the training loop"


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


def describe_ratio(ratio: Rounds) -> str:
    """The feed ratio and its noise. The loop cannot be faster than compute alone, so more than 1 is shown as 1."""
    return f"{min(1.0, ratio.median):.2f}, noise +-{100 * ratio.noise:.0f} %"


def sentence(verdict: Verdict) -> str:
    """The meaning of the verdict, and why it was given."""
    return f"{MEANING[verdict.cause]} ({verdict.why})"


def table(title: str, m: Measured, verdict: Verdict) -> str:
    """All numbers and the verdict, for a terminal."""
    lines = [title, f"  {'each part alone':<28}{'ms per step':>12}   {'from - to':<21}{'rows/s':>12}{'of compute':>12}"]
    for name, timing in ceilings(m).items():
        speed = m.compute_s / timing.median
        if "supply" not in name:  # the others include compute: they are faster by noise only
            speed = min(1.0, speed)
        interval = f"{1000 * timing.low:.3f} - {1000 * timing.high:.3f}"
        rows_per_s = m.batch_size / timing.median
        lines.append(f"  {name:<28}{1000 * timing.median:>12.3f}   {interval:<21}{rows_per_s:>12,.0f}{speed:>10.2f} x")
    transform_ms = 1000 * max(0.0, m.transform.median) * m.compute_s
    lines.append(f"  {'transform, part of compute':<28}{transform_ms:>12.3f}")
    if m.busy_s is not None:
        lines.append(f"  {'device busy, part of compute':<28}{1000 * m.busy_s:>12.3f}")
    lines.append(f"feed ratio {describe_ratio(m.feed_ratio)}")
    lines.append(f"{verdict.cause}: {sentence(verdict)}")
    lines.append(f"  certainty {verdict.certainty}")
    if verdict.cause != "COMPUTE":
        lines.append(f"  change    {verdict.change}")
    if verdict.gain > 1:
        rows_per_s = verdict.gain * m.batch_size / m.loop_s
        lines.append(f"  gain      {verdict.gain:.2f} x the speed, predicted: {rows_per_s:,.0f} rows/s")
    if verdict.see_also:
        lines.append(f"  see also  {verdict.see_also}")
    return "\n".join(lines)


def as_json(subject: Mapping[str, Any], m: Measured, verdict: Verdict, findings: Sequence[Finding]) -> dict[str, Any]:
    """Everything as JSON values.

    subject: see `Bench.subject`.
    """
    parts = {}
    for name, timing in ceilings(m).items():
        rows_per_s = m.batch_size / timing.median
        parts[name] = {"step_s": timing.median, "rounds": timing.values, "rows_per_s": rows_per_s}
    return {
        **subject,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "compute_rows_per_s": m.batch_size / m.compute_s,
        "feed_ratio": m.feed_ratio.median,
        "feed_ratio_rounds": m.feed_ratio.values,
        "feed_ratio_shown": describe_ratio(m.feed_ratio),
        "verdict": verdict._asdict(),
        "ceilings": parts,
        "measured": {
            "transform_s": m.transform.median * m.compute_s,
            "busy_s": m.busy_s,
            "syncs": m.syncs,
            "cpu_share": m.cpu_share.median,
            "ranks_compute_s": [timing.median for timing in m.ranks_compute or [m.compute]],
            "ranks_supply_s": [timing.median for timing in m.ranks_supply],
        },
        "preflight": [finding._asdict() for finding in findings],
    }
