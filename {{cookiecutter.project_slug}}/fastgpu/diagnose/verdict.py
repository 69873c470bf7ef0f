"""What holds a training loop up, and what to change: measurements in, verdict out. Nothing here measures.

Reading, decoding, copying and training overlap, so a loop takes as long as the longest of them. Each was measured
without the others (ceilings.py); the one that the loop's own time comes down to is the cause. What a change would give
follows from the same rule: the longest of what is left.

All times are seconds a step: one optimizer step's rows over all ranks, echoed or not.
"""

from collections.abc import Mapping, Sequence
from statistics import median, median_low, quantiles
from typing import Literal, NamedTuple

Cause = Literal["READ", "DECODE", "AUGMENT", "COPY", "LAUNCH", "SYNC", "COMM", "STRAGGLER", "COMPUTE", "INCONCLUSIVE"]
MEANING: dict[Cause, str] = {
    "READ": "the loop waits for bytes from storage",
    "DECODE": "the loop waits for CPUs that make rows of the bytes",
    "AUGMENT": "the transform takes a large part of the step",
    "COPY": "the loop waits for copies from host to device",
    "LAUNCH": "the device waits for the host to queue its kernels",
    "SYNC": "the step makes the host wait for the device",
    "COMM": "ranks wait for each other's gradients",
    "STRAGGLER": "all ranks wait for one",
    "COMPUTE": "the device computes all the time: nothing to mend",
    "INCONCLUSIVE": "the measurements do not say",
}
DEAD_BAND = 0.05  # a loss below this is none
AUGMENT_SHARE = 0.25  # of a step: less is a transform's good right
UNEVEN = 1.15  # a rank that takes so many times the others' time is a straggler
IDLE_SHARE = 0.2  # of a step in which the device has nothing queued
CPU_SHARE = 0.85  # used: there is none left for more
WAIT_PCT = 10.0  # of a run's time, from where on it is input-bound
NEAR = 0.1  # a time within this of the loop's explains it


class Timing(NamedTuple):
    """Of one thing, measured in several rounds."""

    rounds: tuple[float, ...]

    @property
    def step_s(self) -> float:
        return median(self.rounds)

    @property
    def spread(self) -> float:
        """The interquartile range of the rounds, relative to their median; of three, half their range."""
        low, _, high = quantiles(self.rounds, n=4, method="inclusive") if len(self.rounds) > 1 else (0.0, 0.0, 0.0)
        return (high - low) / self.step_s


class Measured(NamedTuple):
    """What was measured; None: does not exist here (no copies from a device tier) or cannot be seen."""

    batch_size: int
    """Of a step, over all ranks."""
    compute: Timing
    """Transform and step on one batch that stays on the device, all ranks together."""
    loop: Timing
    """The training loop itself; its rounds go with those of `compute`."""
    copy: Timing | None = None
    """Transform and step on pools that are copied from staging memory which nobody has to fill."""
    supply: Timing | None = None
    """The feed without a step behind it."""
    cached: Timing | None = None
    """The same from a few blocks again and again, so from the page cache."""
    transform_s: float = 0.0
    """Of `compute`."""
    ranks_compute_s: tuple[float, ...] = ()
    """Of each rank on its own, without sharing gradients."""
    ranks_supply_s: tuple[float, ...] = ()
    busy_s: float | None = None
    """Of a step on its own, in which the device worked."""
    syncs: tuple[str, ...] = ()
    """Places in the code where a step made the host wait for the device."""
    cpu_share: float = 0.0
    """Of the CPUs' time that the loop and its readers took."""

    @property
    def feed_ratio(self) -> Timing:
        """Speed of the loop relative to `compute`, round by round."""
        return Timing(
            tuple(compute / loop for compute, loop in zip(self.compute.rounds, self.loop.rounds, strict=True))
        )


class Facts(NamedTuple):
    """What a change can be made of."""

    readers_key: str = "loader.num_readers"
    """Or loader.num_workers."""
    readers: int = 1
    near_tier: str | None = None
    """A nearer one than now that the rows fit."""
    most_batch_rows: int = 1 << 40
    echo: float = 1.0
    most_echo: float = 4.0
    float_fields: Mapping[str, int] = {}
    """{field of floats: bytes of a value}; a byte may do."""
    filters: str = ""
    """How the rows are compressed."""
    pins: bool = True
    fp16: bool = False
    lighter: tuple[str, ...] = ()
    """Config lines that each leave something of the transform out."""
    dataset: str = ""
    """The call of convert.py that decodes the user's own Dataset once."""
    unused: tuple[str, ...] = ()
    """Config lines that may make a step faster."""


class Verdict(NamedTuple):
    """One cause, one change."""

    cause: Cause
    why: str
    change: str
    """`key=value` of the config where there is one, else what to do."""
    gain: float
    """Predicted speed of the loop after the change / now."""
    sure: Literal["high", "medium", "low"]
    also: str = ""
    """What else would help, though nobody can say how much."""

    @property
    def is_input(self) -> bool:
        """Whether the supply of rows is what the loop waits for."""
        return self.cause in ("READ", "DECODE")


class _Found(NamedTuple):
    cause: Cause
    why: str
    limit_s: float
    """What the loop's time should be, if this is the cause."""


def worth_trying(cause: Cause, facts: Facts) -> list[str]:
    """Config lines whose effect cannot be told from the ceilings; measure them and give `judge` the numbers."""
    if cause in ("READ", "DECODE"):
        return [f"{facts.readers_key}={max(1, facts.readers * 2)}"]
    if cause == "COPY" and not facts.pins:
        return ["loader.pin_memory=true"]
    return list(facts.lighter) if cause == "AUGMENT" else []


def judge(m: Measured, facts: Facts, tried: Mapping[str, float] | None = None) -> Verdict:
    """The cause, and the change that promises most.

    tried: {config line: seconds a step of that part of the loop which the line changes}: of the supply (READ, DECODE),
    the copies (COPY), the step (AUGMENT).
    """
    loss, noise = 1 - m.feed_ratio.step_s, max(m.feed_ratio.spread, m.loop.spread / 2)
    slowest_s = max((timing.step_s for timing in (m.copy, m.supply) if timing), default=0.0)
    is_close = abs(slowest_s / m.compute.step_s - 1) < 2 * noise
    if noise > DEAD_BAND and loss < 2 * noise and (is_close or DEAD_BAND < loss < noise):
        what = "supply from compute" if is_close else "a loss"
        why = f"rounds differ by {100 * noise:.0f} %, too much to tell {what}"
        return Verdict("INCONCLUSIVE", why, "run it again on a quiet machine, or with --seconds 10", 1.0, "low")
    found = _step(m) if loss <= DEAD_BAND else _input(m) or _step(m, only=("LAUNCH", "SYNC"))
    if loss > DEAD_BAND and found.cause == "COMPUTE":
        times = m.loop.step_s / max(slowest_s, m.compute.step_s)
        why = f"the loop takes {times:.2f} x as long as its slowest part alone"
        return Verdict("INCONCLUSIVE", why, "run it again on a quiet machine, or look at --trace", 1.0, "low")
    change, step_s = _change(found.cause, m, facts, tried or {})
    off = abs(m.loop.step_s - found.limit_s) / m.loop.step_s
    sure: Literal["high", "medium", "low"] = "high" if off < NEAR / 2 and noise < DEAD_BAND else "medium"
    return Verdict(found.cause, found.why, change, max(1.0, m.loop.step_s / step_s), sure, _also(found.cause, facts))


def _input(m: Measured) -> _Found | None:
    """Which part of the way to the device takes as long as the loop, or what it needs of it; None: none."""
    loop_s = m.loop.step_s
    if m.copy and m.copy.step_s >= (1 - NEAR) * loop_s and (not m.supply or m.copy.step_s > 0.95 * m.supply.step_s):
        return _Found("COPY", "a step with copies alone takes as long as the loop", m.copy.step_s)
    if m.supply and m.supply.step_s >= (1 - NEAR) * loop_s:
        if slow := _straggler(m.ranks_supply_s):
            return _Found("STRAGGLER", f"{slow} to supply a batch", m.supply.step_s)
        if not m.cached:
            return _Found("DECODE", "the supply out of RAM takes as long as the loop", m.supply.step_s)
        share = 1 - m.cached.step_s / m.supply.step_s
        if share > 0.5:
            return _Found("READ", f"{100 * share:.0f} % of the supply's time is storage's", m.supply.step_s)
        why = (
            "the supply is as slow from the page cache"
            if share < DEAD_BAND
            else f"{100 * (1 - share):.0f} % of the supply's time is left from the page cache"
        )
        return _Found("DECODE", why, m.supply.step_s)
    supply_matters = m.supply and m.supply.step_s > (loop_s - m.compute.step_s) / 4  # of what is lost
    if supply_matters and m.cpu_share > CPU_SHARE:
        return _Found("DECODE", f"supply and step share the CPUs, of which {100 * m.cpu_share:.0f} % are used", loop_s)
    return None


def _step(m: Measured, only: Sequence[Cause] = ()) -> _Found:
    """What makes the step itself slower than it could be; COMPUTE: nothing."""
    step_s, alone_s = m.compute.step_s, max(m.ranks_compute_s, default=m.compute.step_s)
    lost: dict[Cause, tuple[float, str]] = {}
    if slow := _straggler(m.ranks_compute_s):
        others = sorted(m.ranks_compute_s)[:-1]
        lost["STRAGGLER"] = (1 - median_low(others) / alone_s, f"{slow} for a step of its own")
    if (share := 1 - alone_s / step_s) > DEAD_BAND and len(m.ranks_compute_s) > 1:
        lost["COMM"] = (share, f"{100 * share:.0f} % of a step goes by until all gradients are there")
    if m.busy_s is not None and (idle := 1 - m.busy_s / alone_s) > IDLE_SHARE:
        text = f"the device has nothing to do for {100 * idle:.0f} % of a step"
        host_s = alone_s - m.busy_s  # if the two never overlap, as when each step waits
        if m.syncs:
            lost["SYNC"] = (1 - max(m.busy_s, host_s) / alone_s, f"{text}; the host waits at {', '.join(m.syncs)}")
        if not m.syncs or host_s > 2 * m.busy_s:
            lost["LAUNCH"] = (idle, f"{text}, although its batch lies there")
    if (share := m.transform_s / step_s) > AUGMENT_SHARE:
        lost["AUGMENT"] = (share, f"the transform takes {100 * share:.0f} % of a step")
    lost = {cause: found for cause, found in lost.items() if found[0] > DEAD_BAND and (not only or cause in only)}
    if lost:
        cause = max(lost, key=lambda each: lost[each][0])
        return _Found(cause, lost[cause][1], m.loop.step_s)
    return _Found("COMPUTE", f"the loop has {100 * m.feed_ratio.step_s:.1f} % of its speed without a feed", step_s)


def _straggler(ranks_s: Sequence[float]) -> str:
    """Which rank takes far longer than the others, in words."""
    if len(ranks_s) < 2:
        return ""
    slowest = max(range(len(ranks_s)), key=lambda rank: ranks_s[rank])
    others_s = median_low([seconds for rank, seconds in enumerate(ranks_s) if rank != slowest])
    if ranks_s[slowest] < UNEVEN * others_s:
        return ""
    return f"rank {slowest} takes {ranks_s[slowest] / others_s:.2f} x as long as the others"


def _change(cause: Cause, m: Measured, facts: Facts, tried: Mapping[str, float]) -> tuple[str, float]:
    """What to do, and seconds a step of the loop when it is done."""
    compute_s, loop_s = m.compute.step_s, m.loop.step_s
    copy_s = m.copy.step_s if m.copy else compute_s
    if cause in ("READ", "DECODE"):
        supply_s = m.supply.step_s if m.supply else loop_s
        shares = supply_s < (1 - NEAR) * loop_s  # fast enough alone, but from the CPUs that the step needs
        options = {} if shares else {line: max(copy_s, seconds) for line, seconds in tried.items()}
        if facts.near_tier:
            options[f"data.tier={facts.near_tier}"] = compute_s if facts.near_tier == "device" else copy_s
        best = min(options, key=lambda line: options[line], default="")
        if best and options[best] < (1 - DEAD_BAND) * loop_s:
            return best, options[best]
        if shares and 2 * facts.echo <= facts.most_echo:
            return f"data.echo={2 * facts.echo:g}", (compute_s + loop_s) / 2
        return _echo(m, facts, supply_s)
    if cause == "COPY":
        best = min(tried, key=lambda line: tried[line], default="")
        if best and tried[best] < (1 - DEAD_BAND) * loop_s:
            return best, max(compute_s, tried[best])
        if facts.near_tier == "device":
            return "data.tier=device", compute_s
        if facts.float_fields:
            names, size = ", ".join(facts.float_fields), max(facts.float_fields.values())
            supply_s = m.supply.step_s / size if m.supply else 0.0
            return (
                f"store {names} as uint8: {size} x fewer bytes; the transform makes floats of them on the device",
                max(compute_s, copy_s / size, supply_s),
            )
        return _echo(m, facts, copy_s)
    if cause == "SYNC" and m.busy_s is not None:
        alone_s = max(m.ranks_compute_s, default=compute_s)
        left_s = loop_s - alone_s + max(m.busy_s, alone_s - m.busy_s)
        if facts.fp16:
            return "train.precision=bf16", left_s  # the loss scaler of fp16 asks in each step whether all was finite
        return f"leave the value on the device at {m.syncs[0]}, and read it every log.every_steps", left_s
    if cause == "LAUNCH" and m.busy_s is not None:  # rows of a few steps in one: the host's time is a step's
        times = min(64, 1 << max(1, int(compute_s / m.busy_s).bit_length() - 1))
        while times > 1 and m.batch_size * times > facts.most_batch_rows:
            times //= 2
        if times == 1:
            return "try train.compile=true: there are no rows for a larger batch", loop_s
        return f"data.batch_size={m.batch_size * times}", max(loop_s - compute_s + compute_s / times, m.busy_s)
    if cause == "COMM":
        if m.batch_size * 2 > facts.most_batch_rows:
            return "fewer ranks: there are no rows for a larger batch", loop_s
        return f"data.batch_size={m.batch_size * 2}", loop_s - (compute_s - max(m.ranks_compute_s)) / 2
    if cause == "STRAGGLER":
        is_supply = bool(m.supply and m.supply.step_s >= (1 - NEAR) * loop_s and _straggler(m.ranks_supply_s))
        ranks_s = m.ranks_supply_s if is_supply else m.ranks_compute_s
        *others, slowest = sorted(ranks_s)
        left_s = max(loop_s - (slowest - median_low(others)), compute_s if is_supply else 0.0)
        return f"look at the machine of rank {ranks_s.index(slowest)}: other processes, clocks, its disk", left_s
    if cause == "AUGMENT":
        best = min(tried, key=lambda line: tried[line], default="")
        if best and tried[best] < (1 - DEAD_BAND) * compute_s:
            return best, loop_s - compute_s + tried[best]
        return "make `transform` of the workload lighter, or try train.compile=true", loop_s - m.transform_s
    return "nothing", loop_s


def _also(cause: Cause, facts: Facts) -> str:
    if cause == "DECODE" and facts.dataset:
        return f"decode once instead of in each epoch: {facts.dataset}"
    if cause == "DECODE" and facts.filters:
        return f"rows without {facts.filters}: python convert.py repack"
    if cause == "READ":
        return "a nearer disk, or blocks of 2 MiB (python convert.py info)"
    return ", ".join(facts.unused) if cause in ("COMPUTE", "LAUNCH") else ""


def _echo(m: Measured, facts: Facts, supply_s: float) -> tuple[str, float]:
    """Train on each pool as often as costs no time, if that is more often than now."""
    factor = round(min(facts.most_echo, facts.echo * supply_s / m.compute.step_s), 2)
    if factor < (1 + DEAD_BAND) * facts.echo:
        return (
            "fewer bytes a row, or a faster machine (python convert.py info says how far the file is from best)",
            m.loop.step_s,
        )
    return f"data.echo={factor:g}", max(m.compute.step_s, supply_s * facts.echo / factor)
