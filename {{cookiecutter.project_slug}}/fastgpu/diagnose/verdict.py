"""Concludes from the measurements which part of the loop is the bottleneck, and what to change.

Reading, decoding, copying and training overlap, so the loop takes as long as the slowest of them. Each was measured
without the others (ceilings.py): the part that takes as long as the loop is the cause. The gain of a change follows
from the same rule: afterwards the loop takes as long as the slowest part that is left.

All times are seconds per optimizer step, that is for the rows of one step over all ranks, whether echoed or not.
"""

from collections.abc import Mapping, Sequence
from statistics import median, median_low, quantiles
from typing import Literal, NamedTuple

from fastgpu.diagnose.settings import BATCH_SIZE, COMPILE, ECHO, NUM_READERS, PIN_MEMORY, PRECISION, TIER, Setting
from fastgpu.process.config import Tier

Cause = Literal["READ", "DECODE", "AUGMENT", "COPY", "LAUNCH", "SYNC", "COMM", "STRAGGLER", "COMPUTE", "INCONCLUSIVE"]
Confidence = Literal["high", "medium", "low"]
MEANING: dict[Cause, str] = {
    "READ": "the loop waits for bytes from storage",
    "DECODE": "the loop waits for CPUs that turn bytes into rows",
    "AUGMENT": "the transform takes a large part of the step",
    "COPY": "the loop waits for copies from host to device",
    "LAUNCH": "the device waits for the host to launch its kernels",
    "SYNC": "the step makes the host wait for the device",
    "COMM": "the ranks wait for each other's gradients",
    "STRAGGLER": "all ranks wait for one",
    "COMPUTE": "the device computes all the time: there is nothing to improve",
    "INCONCLUSIVE": "the measurements do not tell",
}
DEAD_BAND = 0.05
"""Differences in speed that are smaller than this do not count."""
NEAR = 0.1
"""A part whose time is this close to that of the loop explains it."""
AUGMENT_SHARE = 0.25
"""A transform that takes a larger part of the step is worth a change."""
STRAGGLER_RATIO = 1.15
"""A rank that takes this many times as long as the others is a straggler."""
IDLE_SHARE = 0.2
"""A device that is idle for a larger part of the step waits for the host."""
CPU_SHARE = 0.85
"""Where a larger part of the CPUs is used, none is left for more readers."""
MAX_BATCH_FACTOR = 64


class Timing(NamedTuple):
    """Seconds per step of one part of the loop, measured in several rounds."""

    rounds: tuple[float, ...]

    @property
    def step_s(self) -> float:
        """The median."""
        return median(self.rounds)

    @property
    def spread(self) -> float:
        """The interquartile range relative to the median; with three rounds it is half of their range."""
        return _relative_iqr(self.rounds)


class Ratio(NamedTuple):
    """A ratio of two timings, taken in each round."""

    rounds: tuple[float, ...]

    @property
    def value(self) -> float:
        """The median."""
        return median(self.rounds)

    @property
    def spread(self) -> float:
        """The interquartile range relative to the median."""
        return _relative_iqr(self.rounds)


def _relative_iqr(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, _, high = quantiles(values, n=4, method="inclusive")
    return (high - low) / median(values)


class Measured(NamedTuple):
    """All measurements. None: the part does not exist here (no copies on the device tier), or it cannot be seen."""

    batch_size: int
    """Rows of one step over all ranks."""
    compute: Timing
    """Transform and step on one batch that stays on the device, on all ranks together."""
    loop: Timing
    """The training loop itself, in the same rounds as `compute`."""
    copy: Timing | None = None
    """Transform and step on pools that are copied from staging memory which is filled already."""
    supply: Timing | None = None
    """The feed, without a step behind it."""
    cached: Timing | None = None
    """The feed of a few blocks again and again, so from the page cache."""
    transform_s: float = 0.0
    """Part of `compute` that the transform takes."""
    ranks_compute_s: tuple[float, ...] = ()
    """`compute` of each rank on its own, without averaging gradients."""
    ranks_supply_s: tuple[float, ...] = ()
    """`supply` of each rank."""
    busy_s: float | None = None
    """Part of a step in which the device was busy."""
    syncs: tuple[str, ...] = ()
    """Places in the code, as `file.py:12`, where the step makes the host wait for the device."""
    cpu_share: float = 0.0
    """Share of the CPUs' time that the loop and its readers used."""

    @property
    def feed_ratio(self) -> Ratio:
        """The speed of the loop relative to `compute`, round by round."""
        pairs = zip(self.compute.rounds, self.loop.rounds, strict=True)
        return Ratio(tuple(compute_s / loop_s for compute_s, loop_s in pairs))


class Facts(NamedTuple):
    """The facts about a run that decide which changes are possible."""

    readers_key: str = NUM_READERS
    """The key for the number of readers: of threads, or of worker processes."""
    n_readers: int = 1
    nearer_tier: Tier | None = None
    """The tier that data.tier=auto would choose now, if it is nearer to the device than the current one."""
    max_batch_size: int = 1 << 40
    """There are no rows for a larger batch."""
    echo: float = 1.0
    max_echo: float = 4.0
    """Largest useful echo factor."""
    float_fields: Mapping[str, int] = {}
    """{field of floats: bytes of one value}. They may fit into one byte."""
    filters: str = ""
    """How the rows are compressed in their file."""
    pin_memory: bool = True
    is_fp16: bool = False
    lighter: tuple[Setting, ...] = ()
    """Settings that each make the transform do less."""
    repack_command: str = ""
    """The command that decodes the user's own Dataset once and for all."""
    faster: tuple[Setting, ...] = ()
    """Settings that are not in use and may make a step faster."""


class Verdict(NamedTuple):
    """One cause and one change."""

    cause: Cause
    why: str
    change: str
    """The setting to change, as `key=value`, or other advice."""
    gain: float
    """Predicted speed of the loop after the change / its speed now."""
    confidence: Confidence
    overrides: Mapping[str, bool | int | float | str] = {}
    """The change as {dotted key: value}. Empty: the change is not a setting."""
    see_also: str = ""
    """Something else that would help, by an unknown factor."""

    @property
    def is_input(self) -> bool:
        """Whether the loop waits for the supply of rows."""
        return self.cause in ("READ", "DECODE")


class _Suspect(NamedTuple):
    cause: Cause
    why: str
    loop_s: float
    """The time that the loop should take if this is the cause."""


class _Change(NamedTuple):
    text: str
    loop_s: float
    """The time that the loop should take afterwards."""
    overrides: Mapping[str, bool | int | float | str] = {}


def settings_to_try(cause: Cause, facts: Facts) -> list[Setting]:
    """Settings whose effect does not follow from the ceilings. Measure them, and call `judge` with the results."""
    if cause in ("READ", "DECODE"):
        return [Setting(facts.readers_key, max(1, 2 * facts.n_readers))]
    if cause == "COPY" and not facts.pin_memory:
        return [Setting(PIN_MEMORY, True)]
    if cause == "AUGMENT":
        return list(facts.lighter)
    return []


def judge(m: Measured, facts: Facts, tried: Mapping[Setting, float] | None = None) -> Verdict:
    """The bottleneck, and the change that promises most.

    tried: {setting: seconds per step with it}, of the part of the loop that the setting changes: the supply (READ,
    DECODE), the copies (COPY) or the step (AUGMENT).
    """
    shortfall = 1 - m.feed_ratio.value
    noise = max(m.feed_ratio.spread, m.loop.spread / 2)
    slowest_feed_s = max((timing.step_s for timing in (m.copy, m.supply) if timing), default=0.0)
    feed_equals_compute = abs(slowest_feed_s / m.compute.step_s - 1) < 2 * noise
    may_be_noise = DEAD_BAND < shortfall < noise
    if noise > DEAD_BAND and shortfall < 2 * noise and (feed_equals_compute or may_be_noise):
        question = "whether there is a shortfall"
        if feed_equals_compute:
            question = "which of supply and compute is slower"
        why = f"the rounds differ by {100 * noise:.0f} %, too much to tell {question}"
        return _inconclusive(why, "run it again on a quiet machine, or with --seconds 10")

    if shortfall <= DEAD_BAND:
        suspect = _suspect_in_step(m)
    else:
        suspect = _suspect_in_feed(m) or _suspect_in_step(m, among=("LAUNCH", "SYNC"))
        if suspect.cause == "COMPUTE":
            factor = m.loop.step_s / max(slowest_feed_s, m.compute.step_s)
            why = f"the loop takes {factor:.2f} x as long as its slowest part alone"
            return _inconclusive(why, "run it again on a quiet machine, or look at --trace")
    change = _change(suspect.cause, m, facts, tried or {})
    error = abs(m.loop.step_s - suspect.loop_s) / m.loop.step_s
    return Verdict(
        suspect.cause,
        suspect.why,
        change.text,
        max(1.0, m.loop.step_s / change.loop_s),
        "high" if error < NEAR / 2 and noise < DEAD_BAND else "medium",
        change.overrides,
        _see_also(suspect.cause, facts),
    )


def _inconclusive(why: str, advice: str) -> Verdict:
    return Verdict("INCONCLUSIVE", why, advice, gain=1.0, confidence="low")


# ---------------------------------------------------------------------------------------------- the cause


def _suspect_in_feed(m: Measured) -> _Suspect | None:
    """The part of the way to the device that takes as long as the loop. None: no part does."""
    loop_s = m.loop.step_s
    explains_loop_s = (1 - NEAR) * loop_s
    supply_s = m.supply.step_s if m.supply else 0.0
    if m.copy and m.copy.step_s >= explains_loop_s and m.copy.step_s > 0.95 * supply_s:
        return _Suspect("COPY", "steps with copies alone take as long as the loop", m.copy.step_s)
    if supply_s >= explains_loop_s:
        return _suspect_in_supply(m, supply_s)
    supply_matters = m.supply and supply_s > (loop_s - m.compute.step_s) / 4
    if supply_matters and m.cpu_share > CPU_SHARE:
        why = f"supply and step share the CPUs, of which {100 * m.cpu_share:.0f} % are used"
        return _Suspect("DECODE", why, loop_s)
    return None


def _suspect_in_supply(m: Measured, supply_s: float) -> _Suspect:
    """The part of the supply, which takes as long as the loop, that is slow."""
    if slow_rank := _describe_straggler(m.ranks_supply_s):
        return _Suspect("STRAGGLER", f"{slow_rank} to supply a batch", supply_s)
    if not m.cached:
        return _Suspect("DECODE", "the supply from memory takes as long as the loop", supply_s)
    storage_share = 1 - m.cached.step_s / supply_s
    if storage_share > 0.5:
        return _Suspect("READ", f"{100 * storage_share:.0f} % of the supply's time is spent in storage", supply_s)
    if storage_share < DEAD_BAND:
        return _Suspect("DECODE", "the supply from the page cache is just as slow", supply_s)
    why = f"the supply from the page cache still takes {100 * (1 - storage_share):.0f} % of the time"
    return _Suspect("DECODE", why, supply_s)


def _suspect_in_step(m: Measured, among: Sequence[Cause] = ()) -> _Suspect:
    """The reason why the step is slower than it could be. COMPUTE: there is none. among: only these (empty: all)."""
    step_s = m.compute.step_s
    local_s = max(m.ranks_compute_s, default=step_s)
    shortfalls: dict[Cause, tuple[float, str]] = {}  # the part of the step that could be saved, and why
    if slow_rank := _describe_straggler(m.ranks_compute_s):
        other_ranks_s = sorted(m.ranks_compute_s)[:-1]
        shortfalls["STRAGGLER"] = (1 - median_low(other_ranks_s) / local_s, f"{slow_rank} for a step of its own")
    if len(m.ranks_compute_s) > 1:
        share = 1 - local_s / step_s
        shortfalls["COMM"] = (share, f"{100 * share:.0f} % of a step passes until all gradients have arrived")
    if m.busy_s is not None:
        shortfalls |= _idle_shortfalls(m, m.busy_s, local_s)
    transform_share = m.transform_s / step_s
    if transform_share > AUGMENT_SHARE:
        shortfalls["AUGMENT"] = (transform_share, f"the transform takes {100 * transform_share:.0f} % of a step")
    eligible = [cause for cause in shortfalls if shortfalls[cause][0] > DEAD_BAND and (not among or cause in among)]
    if eligible:
        worst = max(eligible, key=lambda cause: shortfalls[cause][0])
        return _Suspect(worst, shortfalls[worst][1], m.loop.step_s)
    return _Suspect("COMPUTE", f"the loop runs at {100 * m.feed_ratio.value:.1f} % of its speed without a feed", step_s)


def _idle_shortfalls(m: Measured, busy_s: float, local_s: float) -> dict[Cause, tuple[float, str]]:
    """Reasons why the device is idle in a step although its batch is there."""
    shortfalls: dict[Cause, tuple[float, str]] = {}
    idle_share = 1 - busy_s / local_s
    if idle_share <= IDLE_SHARE:
        return shortfalls
    text = f"the device is idle for {100 * idle_share:.0f} % of a step"
    host_s = local_s - busy_s  # if host and device never overlap, as when each step waits
    if m.syncs:
        places = ", ".join(m.syncs)
        shortfalls["SYNC"] = (1 - max(busy_s, host_s) / local_s, f"{text}; the host waits at {places}")
    if not m.syncs or host_s > 2 * busy_s:
        shortfalls["LAUNCH"] = (idle_share, f"{text}, although its batch is there")
    return shortfalls


def _describe_straggler(ranks_s: Sequence[float]) -> str:
    """The rank that takes far longer than the others, in words. Empty: there is none."""
    if len(ranks_s) < 2:
        return ""
    slowest = ranks_s.index(max(ranks_s))
    others_s = median_low([seconds for rank, seconds in enumerate(ranks_s) if rank != slowest])
    if ranks_s[slowest] < STRAGGLER_RATIO * others_s:
        return ""
    return f"rank {slowest} takes {ranks_s[slowest] / others_s:.2f} x as long as the others"


# ---------------------------------------------------------------------------------------------- the change


def _change(cause: Cause, m: Measured, facts: Facts, tried: Mapping[Setting, float]) -> _Change:
    """The change that promises most against this cause."""
    if cause in ("READ", "DECODE"):
        return _change_supply(m, facts, tried)
    if cause == "COPY":
        return _change_copies(m, facts, tried)
    if cause == "AUGMENT":
        return _change_transform(m, tried)
    if cause == "SYNC" and m.busy_s is not None:
        return _change_syncs(m, facts, m.busy_s)
    if cause == "LAUNCH" and m.busy_s is not None:
        return _change_launches(m, facts, m.busy_s)
    if cause == "COMM":
        return _change_communication(m, facts)
    if cause == "STRAGGLER":
        return _change_straggler(m)
    return _Change("nothing", m.loop.step_s)


def _set(key: str, value: bool | int | float | str, loop_s: float) -> _Change:
    return _Change(str(Setting(key, value)), loop_s, {key: value})


def _change_supply(m: Measured, facts: Facts, tried: Mapping[Setting, float]) -> _Change:
    loop_s = m.loop.step_s
    copy_s = (m.copy or m.compute).step_s
    supply_s = (m.supply or m.loop).step_s
    shares_cpus = supply_s < (1 - NEAR) * loop_s  # the supply is fast enough alone, but takes CPUs from the step
    options: dict[Setting, float] = {}
    if not shares_cpus:
        options = {setting: max(copy_s, step_s) for setting, step_s in tried.items()}
    if facts.nearer_tier == "device":
        options[Setting(TIER, "device")] = m.compute.step_s
    elif facts.nearer_tier:
        options[Setting(TIER, facts.nearer_tier)] = copy_s
    best = _best(options, (1 - DEAD_BAND) * loop_s)
    if best:
        return _set(best.key, best.value, options[best])
    if shares_cpus and 2 * facts.echo <= facts.max_echo:
        return _set(ECHO, 2 * facts.echo, (m.compute.step_s + loop_s) / 2)
    return _change_echo(m, facts, supply_s)


def _change_copies(m: Measured, facts: Facts, tried: Mapping[Setting, float]) -> _Change:
    compute_s = m.compute.step_s
    copy_s = (m.copy or m.compute).step_s
    best = _best(tried, (1 - DEAD_BAND) * m.loop.step_s)
    if best:
        return _set(best.key, best.value, max(compute_s, tried[best]))
    if facts.nearer_tier == "device":
        return _set(TIER, "device", compute_s)
    if facts.float_fields:
        names = ", ".join(facts.float_fields)
        factor = max(facts.float_fields.values())
        supply_s = m.supply.step_s if m.supply else 0.0
        advice = f"store {names} as uint8: {factor} x fewer bytes; the transform turns them into floats on the device"
        return _Change(advice, max(compute_s, copy_s / factor, supply_s / factor))
    return _change_echo(m, facts, copy_s)


def _change_transform(m: Measured, tried: Mapping[Setting, float]) -> _Change:
    best = _best(tried, (1 - DEAD_BAND) * m.compute.step_s)
    if best:
        return _set(best.key, best.value, m.loop.step_s - m.compute.step_s + tried[best])
    advice = f"make `transform` of the workload lighter, or try {Setting(COMPILE, True)}"
    return _Change(advice, m.loop.step_s - m.transform_s)


def _change_syncs(m: Measured, facts: Facts, busy_s: float) -> _Change:
    local_s = max(m.ranks_compute_s, default=m.compute.step_s)
    loop_s = m.loop.step_s - local_s + max(busy_s, local_s - busy_s)
    if facts.is_fp16:  # its loss scaler asks in every step whether all gradients are finite
        return _set(PRECISION, "bf16", loop_s)
    return _Change(f"leave the value on the device at {m.syncs[0]}, and read it every log.every_steps", loop_s)


def _change_launches(m: Measured, facts: Facts, busy_s: float) -> _Change:
    """The host takes as long for a large batch as for a small one."""
    compute_s = m.compute.step_s
    factor = min(MAX_BATCH_FACTOR, 1 << max(1, int(compute_s / busy_s).bit_length() - 1))
    while factor > 1 and m.batch_size * factor > facts.max_batch_size:
        factor //= 2
    if factor == 1:
        return _Change(f"try {Setting(COMPILE, True)}: there are no rows for a larger batch", m.loop.step_s)
    return _set(BATCH_SIZE, m.batch_size * factor, max(m.loop.step_s - compute_s + compute_s / factor, busy_s))


def _change_communication(m: Measured, facts: Facts) -> _Change:
    if m.batch_size * 2 > facts.max_batch_size:
        return _Change("use fewer ranks: there are no rows for a larger batch", m.loop.step_s)
    communication_s = m.compute.step_s - max(m.ranks_compute_s)
    return _set(BATCH_SIZE, m.batch_size * 2, m.loop.step_s - communication_s / 2)


def _change_straggler(m: Measured) -> _Change:
    supply_is_slow = bool(m.supply and m.supply.step_s >= (1 - NEAR) * m.loop.step_s)
    if supply_is_slow and _describe_straggler(m.ranks_supply_s):
        ranks_s = m.ranks_supply_s
        min_loop_s = m.compute.step_s
    else:
        ranks_s = m.ranks_compute_s
        min_loop_s = 0.0
    *other_ranks_s, slowest_s = sorted(ranks_s)
    loop_s = m.loop.step_s - (slowest_s - median_low(other_ranks_s))
    advice = f"look at the machine of rank {ranks_s.index(slowest_s)}: other processes, clocks, its disk"
    return _Change(advice, max(loop_s, min_loop_s))


def _change_echo(m: Measured, facts: Facts, feed_s: float) -> _Change:
    """Train on each pool as often as costs no time, if that is more often than now."""
    factor = round(min(facts.max_echo, facts.echo * feed_s / m.compute.step_s), 2)
    if factor < (1 + DEAD_BAND) * facts.echo:
        advice = "store fewer bytes per row, or use a faster machine (python convert.py info rates the file)"
        return _Change(advice, m.loop.step_s)
    return _set(ECHO, factor, max(m.compute.step_s, feed_s * facts.echo / factor))


def _best(step_s: Mapping[Setting, float], limit_s: float) -> Setting | None:
    """The fastest setting, if it takes less than the limit."""
    best = min(step_s, key=lambda setting: step_s[setting], default=None)
    return best if best and step_s[best] < limit_s else None


def _see_also(cause: Cause, facts: Facts) -> str:
    if cause == "DECODE" and facts.repack_command:
        return f"decode once instead of in each epoch: {facts.repack_command}"
    if cause == "DECODE" and facts.filters:
        return f"store the rows without {facts.filters}: python convert.py repack"
    if cause == "READ":
        return "a faster disk, or blocks of 2 MiB (python convert.py info)"
    if cause in ("COMPUTE", "LAUNCH"):
        return ", ".join(map(str, facts.faster))
    return ""
