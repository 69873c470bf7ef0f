"""The measurements and the verdict, as a table for a terminal and as JSON values."""

import time
from typing import Any

from fastgpu.diagnose.verdict import Measured, Rounds, Verdict, advice


def ceilings(m: Measured) -> dict[str, Rounds]:
    """{name: timing} of each part, from the device back to the storage, and of the loop."""
    timings = {
        "compute": m.compute,
        "copies": m.copy,
        "supply from the page cache": m.cached,
        "supply": m.supply,
        "the training loop": m.loop,
    }
    return {name: timing for name, timing in timings.items() if timing}


def table(title: str, m: Measured, verdict: Verdict) -> str:
    """All numbers and the verdict, for a terminal."""
    feed_ratio = min(1.0, m.feed_ratio)
    lines = [title, f"  {'each part alone':<28}{'ms per step':>12}   {'from - to':<21}{'rows/s':>12}{'of compute':>12}"]
    for name, timing in ceilings(m).items():
        speed = feed_ratio if timing is m.loop else m.of_compute(timing)
        interval = f"{1000 * timing.low:.3f} - {1000 * timing.high:.3f}"
        rows_per_s = m.batch_size / timing.median
        lines.append(f"  {name:<28}{1000 * timing.median:>12.3f}   {interval:<21}{rows_per_s:>12,.0f}{speed:>10.2f} x")
    transform = f"{1000 * m.transform.median * m.compute.median:.3f}" if m.transform.low > 0 else "below the noise"
    lines.append(f"  {'transform, part of compute':<28}{transform:>12}")
    if m.busy_s is not None:
        lines.append(f"  {'device busy, part of compute':<28}{1000 * m.busy_s:>12.3f}")
    lines.append(f"feed ratio {feed_ratio:.2f}, the feed costs {m.lost} of the time")
    lines.append(f"{verdict.cause}: {verdict.why}")
    is_echo = verdict.change.startswith("data.echo=")
    if verdict.change:
        rows_per_s = verdict.gain * m.batch_size / m.loop.median
        lines.append(f"  change    {verdict.change}")
        rows = "rows/s, repeated ones included" if is_echo else "rows/s"
        lines.append(f"  gain      {verdict.gain:.2f} x the speed, predicted: {rows_per_s:,.0f} {rows}")
    if verdict.free_echo and not is_echo:
        lines.append(f"  echo      data.echo={verdict.free_echo:g} trains on each row that often in the same time")
    lines.append(f"  see also  {advice(verdict.cause, m)}")
    return "\n".join(lines)


def as_json(title: str, m: Measured, verdict: Verdict) -> dict[str, Any]:
    """Everything as JSON values. Times are seconds per step, one for each round."""
    date = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    return {"title": title, "date": date, "verdict": verdict._asdict(), "feed_ratio": m.feed_ratio, **m._asdict()}
