"""Where the wall time of a run went, from its metrics.jsonl and run*.json alone."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import accumulate
from math import inf, isfinite, nan
from typing import Any, NamedTuple

Point = dict[str, float]
"""A line of metrics.jsonl: step, time_s, part, the sums of a `Throughput`, and scalars, named `group/name_unit`."""
KINDS = {
    "computing": "#",
    "waiting for data": ".",
    "starting": ">",
    "validating": "v",
    "saving": "s",
    "validating and saving": "&",
    "lost to kills": "x",
    "other": "-",
}
"""{kind of time: its character in the bar}. Older versions did not log how long saving takes, so their runs have
`validating and saving` as one kind."""
BAR_WIDTH = 72
SHORT_S = 600
MAX_S = 1e8
"""Three years. A longer time comes from a clock that was changed."""


class Process(NamedTuple):
    """The process of a part of a run, from its run.json. NaN: not known, or the process was killed."""

    written_s: float = nan
    """When run.json was written, just before the first point."""
    started_s: float = nan
    ended_s: float = nan
    """When everything was saved. All versions that write `started_s` write this, too."""


def read_process(description: Mapping[str, Any]) -> Process:
    """The times in a run.json. Raises an exception of any kind if there are none."""
    written_s = datetime.fromisoformat(description["started"]).timestamp()
    return Process(written_s, *(float(description.get(name, nan)) for name in ("started_s", "ended_s")))


def account(points: Sequence[Point], processes: Iterable[Process]) -> dict[str, float]:
    """{one of KINDS: seconds}. It is empty if the points have no times.

    points: all of them, in the order of the file. Steps that a later process made again are lost, and so is the time
    from a kill to the next start. The time after an end that saved everything does not count.
    """
    spent = dict.fromkeys(KINDS, 0.0)

    def add(kind: str, seconds: float) -> None:
        spent[kind] += seconds if 0 < seconds < MAX_S else 0.0  # other times come from a clock that was changed

    parts: dict[float, list[Point]] = {}
    for point in points:
        if isfinite(point.get("time_s", nan)):
            parts.setdefault(point["part"], []).append(point)
    last_kept: dict[float, float] = {}  # the step of each part at which a later one was resumed
    resumed_at = inf
    for part, own in reversed(parts.items()):
        last_kept[part] = resumed_at
        resumed_at = min(resumed_at, own[0]["step"] - own[0].get("steps", 0))

    known = [process for process in processes if isfinite(process.written_s)]
    at, is_killed = -inf, False
    for part, own in parts.items():
        before = [process for process in known if process.written_s <= part + 1]
        process = max(before, default=Process(part))
        started_s = process.started_s if isfinite(process.started_s) else process.written_s
        if is_killed:
            add("lost to kills", started_s - at)
        at = max(at, started_s)  # a notebook, too, may be the process of several parts
        for point in own:
            _add_point(point, at, last_kept[part], is_first=point is own[0], add=add)
            at = point["time_s"]
        is_killed = not isfinite(process.ended_s)
        if not is_killed:  # a run that is stopped saves after its last point
            add("saving", process.ended_s - at)
            at = max(at, process.ended_s)
        elif not isfinite(process.started_s):
            is_killed = own[-1]["step"] > last_kept[part]
    return {kind: seconds for kind, seconds in spent.items() if seconds}


def _add_point(
    point: Point, before_s: float, last_kept: float, *, is_first: bool, add: Callable[[str, float], None]
) -> None:
    """Account for the time from the last point, or the start, to this one."""
    seconds, waiting, saving = (point.get(name, 0.0) for name in ("seconds", "wait_s", "run/save_s"))
    gap = point["time_s"] - seconds - before_s
    if "seconds" in point:
        add("starting" if is_first else "other", gap)
        parts = {"computing": seconds - waiting - saving, "waiting for data": waiting, "saving": saving}
    else:
        validating = "validating" if "run/save_s" in point else "validating and saving"
        parts = {"starting" if is_first else validating: gap - saving, "saving": saving}
    lost_share = min(1.0, max(0.0, (point["step"] - last_kept) / (point.get("steps") or 1)))
    for kind, part_s in parts.items():
        add(kind, (1 - lost_share) * part_s)
        add("lost to kills", lost_share * part_s)


def goodput(spent: Mapping[str, float]) -> float:
    """The share of the wall time spent on steps that the run kept."""
    return spent.get("computing", 0.0) / sum(spent.values())


def as_rows(spent: Mapping[str, float]) -> list[tuple[str, str, str]]:
    """(kind, time, share) as text, and the whole as the last row. Less than 0.05 % of the time is left out."""
    total = sum(spent.values())
    rows = [*((kind, seconds) for kind, seconds in spent.items() if seconds >= 0.0005 * total), ("wall time", total)]
    return [(name, _duration(seconds, total), f"{100 * seconds / total:.1f} %") for name, seconds in rows if total]


def bar(spent: Mapping[str, float]) -> str:
    """A line of BAR_WIDTH characters, shared by the kinds as the wall time is. It is empty if there are no times."""
    line = ""
    for kind, end_s in zip(spent, accumulate(spent.values()), strict=True):
        line += KINDS[kind] * (round(BAR_WIDTH * end_s / sum(spent.values())) - len(line))
    return line


def _duration(seconds: float, total: float) -> str:
    """A time as text, with one decimal if the total is short."""
    return f"{seconds:.1f} s" if total < SHORT_S else str(timedelta(0, round(seconds)))
