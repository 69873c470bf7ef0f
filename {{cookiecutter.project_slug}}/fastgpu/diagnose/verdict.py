"""Concludes from the measurements which part of the loop is the bottleneck, and what to change.

Reading, decoding, copying and training overlap, so the loop takes as long as the slowest of them. Each was measured
without the others (ceilings.py): the part that takes as long as the loop is the cause. The gain of a change follows
from the same rule: afterwards the loop takes as long as the slowest part that is left.

All times are seconds per optimizer step, that is for the rows of one step over all ranks, whether echoed or not.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import median, median_low, quantiles
from typing import Any, Literal, NamedTuple

from fastgpu.process.config import Tier

Cause = Literal["READ", "DECODE", "AUGMENT", "COPY", "LAUNCH", "SYNC", "COMM", "STRAGGLER", "COMPUTE", "INCONCLUSIVE"]
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
DEAD_BAND = 0.05  # smaller differences in speed do not count
NEAR = 0.1  # a part whose time is this close to that of the loop explains it
AUGMENT_SHARE = 0.25  # a transform that takes a larger part of the step is worth a change
STRAGGLER_RATIO = 1.15  # a rank that takes this many times as long as the others is a straggler
IDLE_SHARE = 0.2  # a device that is idle for a larger part of the step waits for the host
CPU_SHARE = 0.85  # where a larger part of the CPUs is used, none is left for more readers
MAX_BATCH_FACTOR = 64

Overrides = Mapping[str, Any]
"""{dotted key: value} of settings that replace those of a config."""


class Setting(NamedTuple):
    """One key of the config and a value for it. As text it is a word of the command line: `data.echo=2`."""

    key: str
    value: bool | int | float | str

    def __str__(self) -> str:
        if isinstance(self.value, bool):
            return f"{self.key}={str(self.value).lower()}"
        if isinstance(self.value, float):
            return f"{self.key}={self.value:g}"
        return f"{self.key}={self.value}"


class Rounds(NamedTuple):
    """One quantity, measured in several rounds: seconds per step, or the ratio of two."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def spread(self) -> float:
        """The interquartile range relative to the median; with three rounds it is half of their range."""
        if len(self.values) < 2:
            return 0.0
        low, _, high = quantiles(self.values, n=4, method="inclusive")
        return (high - low) / self.median


class Measured(NamedTuple):
    """All measurements. None: the part does not exist here (no copies on the device tier), or it cannot be seen."""

    batch_size: int
    """Rows of one step over all ranks."""
    compute: Rounds
    """Transform and step on one batch that stays on the device, on all ranks together."""
    loop: Rounds
    """The training loop itself, in the same rounds as `compute`."""
    copy: Rounds | None = None
    """Transform and step on pools that are copied from staging memory which is filled already."""
    supply: Rounds | None = None
    """The feed, without a step behind it."""
    cached: Rounds | None = None
    """The feed of a few blocks again and again, so from the page cache."""
    transform_s: float = 0.0
    """Part of `compute` that the transform takes."""
    ranks_compute_s: tuple[float, ...] = ()
    """`compute` of each rank on its own, without averaging gradients."""
    ranks_supply_s: tuple[float, ...] = ()
    busy_s: float | None = None
    """Part of a step in which the device was busy."""
    syncs: tuple[str, ...] = ()
    """Places in the code, as `file.py:12`, where the step makes the host wait for the device."""
    cpu_share: float = 0.0
    """Share of the CPUs' time that the loop and its readers used."""

    @property
    def feed_ratio(self) -> Rounds:
        """The speed of the loop relative to `compute`, round by round."""
        pairs = zip(self.compute.values, self.loop.values, strict=True)
        return Rounds(tuple(compute_s / loop_s for compute_s, loop_s in pairs))

    @property
    def compute_s(self) -> float:
        return self.compute.median

    @property
    def loop_s(self) -> float:
        return self.loop.median

    @property
    def copy_s(self) -> float:
        """0: there are no copies."""
        return self.copy.median if self.copy else 0.0

    @property
    def supply_s(self) -> float:
        """0: the rows lie on the device."""
        return self.supply.median if self.supply else 0.0

    @property
    def local_s(self) -> float:
        """Seconds of a step of the slowest rank, without averaging gradients."""
        return max(self.ranks_compute_s, default=self.compute_s)


class Facts(NamedTuple):
    """The facts about a run that decide which changes are possible."""

    readers_key: str = "loader.num_readers"
    """The key for the number of readers: of threads, or of worker processes."""
    n_readers: int = 1
    nearer_tier: Tier | None = None
    """The tier that data.tier=auto would choose now, if it is nearer to the device than the current one."""
    max_batch_size: int = 1 << 40
    echo: float = 1.0
    max_echo: float = 4.0
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
    confidence: Literal["high", "medium", "low"]
    overrides: Mapping[str, Any] = {}
    """The change as {dotted key: value}. Empty: the change is not a setting."""
    see_also: str = ""
    """Something else that would help, by an unknown factor."""


Tried = Mapping[Setting, float]
"""{setting: seconds per step with it} of the part of the loop that the setting changes."""


Suspect = tuple[Cause, str, float]
"""(cause, why, seconds that the loop should take if this is the cause)"""
Change = tuple[Setting | str, float]
"""(setting or other advice, seconds that the loop should take afterwards)"""


def settings_to_try(cause: Cause, facts: Facts) -> list[Setting]:
    """Settings whose effect does not follow from the ceilings. Measure them, and call `judge` with the results."""
    if cause in ("READ", "DECODE"):
        return [Setting(facts.readers_key, max(1, 2 * facts.n_readers))]
    if cause == "COPY" and not facts.pin_memory:
        return [Setting("loader.pin_memory", True)]
    if cause == "AUGMENT":
        return list(facts.lighter)
    return []


def judge(m: Measured, facts: Facts, tried: Tried | None = None) -> Verdict:
    """The bottleneck, and the change that promises most.

    tried: what was measured with the settings of `settings_to_try`: the supply (READ, DECODE), the copies (COPY) or the
    step (AUGMENT).
    """
    shortfall = 1 - m.feed_ratio.median
    noise = max(m.feed_ratio.spread, m.loop.spread / 2)
    slowest_feed_s = max(m.copy_s, m.supply_s)
    feed_equals_compute = abs(slowest_feed_s / m.compute_s - 1) < 2 * noise
    may_be_noise = DEAD_BAND < shortfall < noise
    if noise > DEAD_BAND and shortfall < 2 * noise and (feed_equals_compute or may_be_noise):
        question = "whether there is a shortfall"
        if feed_equals_compute:
            question = "which of supply and compute is slower"
        why = f"the rounds differ by {100 * noise:.0f} %, too much to tell {question}"
        return Verdict("INCONCLUSIVE", why, "run it again on a quiet machine, or with --seconds 10", 1.0, "low")

    suspect: Suspect | None
    if shortfall <= DEAD_BAND:
        fed = f"the loop runs at {100 * m.feed_ratio.median:.1f} % of its speed without a feed"
        suspect = _suspect_in_step(m) or ("COMPUTE", fed, m.compute_s)
    else:
        suspect = _suspect_in_feed(m) or _suspect_in_step(m, among=("LAUNCH", "SYNC"))
    if suspect is None:
        factor = m.loop_s / max(slowest_feed_s, m.compute_s)
        why = f"the loop takes {factor:.2f} x as long as its slowest part alone"
        return Verdict("INCONCLUSIVE", why, "run it again on a quiet machine, or look at --trace", 1.0, "low")

    cause, why, explained_s = suspect
    change, changed_loop_s = _CHANGES[cause](m, facts, tried or {})
    error = abs(m.loop_s - explained_s) / m.loop_s
    return Verdict(
        cause,
        why,
        str(change),
        gain=max(1.0, m.loop_s / changed_loop_s),
        confidence="high" if error < NEAR / 2 and noise < DEAD_BAND else "medium",
        overrides={change.key: change.value} if isinstance(change, Setting) else {},
        see_also=_see_also(cause, facts),
    )


# ---------------------------------------------------------------------------------------------- the cause


def _suspect_in_feed(m: Measured) -> Suspect | None:
    """The part of the way to the device that takes as long as the loop. None: no part does."""
    explains_loop_s = (1 - NEAR) * m.loop_s
    if m.copy_s >= explains_loop_s and m.copy_s > 0.95 * m.supply_s:
        return "COPY", "steps with copies alone take as long as the loop", m.copy_s
    if m.supply_s >= explains_loop_s:
        cause, why = _why_supply_is_slow(m)
        return cause, why, m.supply_s
    supply_matters = m.supply_s > (m.loop_s - m.compute_s) / 4
    if supply_matters and m.cpu_share > CPU_SHARE:
        why = f"supply and step share the CPUs, of which {100 * m.cpu_share:.0f} % are used"
        return "DECODE", why, m.loop_s
    return None


def _why_supply_is_slow(m: Measured) -> tuple[Cause, str]:
    if slow_rank := _describe_straggler(m.ranks_supply_s):
        return "STRAGGLER", f"{slow_rank} to supply a batch"
    if not m.cached:
        return "DECODE", "the supply from memory takes as long as the loop"
    storage_share = 1 - m.cached.median / m.supply_s
    if storage_share > 0.5:
        return "READ", f"{100 * storage_share:.0f} % of the supply's time is spent in storage"
    if storage_share < DEAD_BAND:
        return "DECODE", "the supply from the page cache is just as slow"
    return "DECODE", f"the supply from the page cache still takes {100 * (1 - storage_share):.0f} % of the time"


def _suspect_in_step(m: Measured, among: Sequence[Cause] = ()) -> Suspect | None:
    """What costs most of the step, if that is worth a change. among: consider only these causes (empty: all)."""
    costs: dict[Cause, tuple[float, str]] = {}  # the share of the step that could be saved, and why
    if slow_rank := _describe_straggler(m.ranks_compute_s):
        cost = 1 - _other_ranks_s(m.ranks_compute_s) / m.local_s
        costs["STRAGGLER"] = (cost, f"{slow_rank} for a step of its own")
    if len(m.ranks_compute_s) > 1:
        cost = 1 - m.local_s / m.compute_s
        costs["COMM"] = (cost, f"{100 * cost:.0f} % of a step passes until all gradients have arrived")
    idle_s = 0.0
    if m.busy_s is not None:
        idle_s = m.local_s - m.busy_s  # the host's time, if it never overlaps with that of the device
    idle_share = idle_s / m.local_s
    if m.busy_s is not None and idle_share > IDLE_SHARE:
        idle = f"the device is idle for {100 * idle_share:.0f} % of a step"
        if m.syncs:
            cost = 1 - max(m.busy_s, idle_s) / m.local_s
            costs["SYNC"] = (cost, f"{idle}; the host waits at {', '.join(m.syncs)}")
        if not m.syncs or idle_s > 2 * m.busy_s:
            costs["LAUNCH"] = (idle_share, f"{idle}, although its batch is there")
    transform_share = m.transform_s / m.compute_s
    if transform_share > AUGMENT_SHARE:
        costs["AUGMENT"] = (transform_share, f"the transform takes {100 * transform_share:.0f} % of a step")

    eligible = [cause for cause in costs if costs[cause][0] > DEAD_BAND and (not among or cause in among)]
    if not eligible:
        return None
    worst = max(eligible, key=lambda cause: costs[cause][0])
    return worst, costs[worst][1], m.loop_s


def _other_ranks_s(ranks_s: Sequence[float]) -> float:
    """The time of a usual rank: the median of all but the slowest."""
    return median_low(sorted(ranks_s)[:-1])


def _describe_straggler(ranks_s: Sequence[float]) -> str:
    """The rank that takes far longer than the others, in words. Empty: there is none."""
    if len(ranks_s) < 2:
        return ""
    slowest_s = max(ranks_s)
    factor = slowest_s / _other_ranks_s(ranks_s)
    if factor < STRAGGLER_RATIO:
        return ""
    return f"rank {ranks_s.index(slowest_s)} takes {factor:.2f} x as long as the others"


# ---------------------------------------------------------------------------------------------- the change


def _change_supply(m: Measured, facts: Facts, tried: Tried) -> Change:
    copy_s = m.copy_s or m.compute_s
    shares_cpus = m.supply_s < (1 - NEAR) * m.loop_s  # the supply is fast enough alone, but takes CPUs from the step
    options: dict[Setting, float] = {}
    if not shares_cpus:
        options = {setting: max(copy_s, step_s) for setting, step_s in tried.items()}
    if facts.nearer_tier:
        options[Setting("data.tier", facts.nearer_tier)] = m.compute_s if facts.nearer_tier == "device" else copy_s
    best = _best(options, m.loop_s)
    if best:
        return best, options[best]
    if shares_cpus and 2 * facts.echo <= facts.max_echo:
        return Setting("data.echo", 2 * facts.echo), (m.compute_s + m.loop_s) / 2
    return _change_echo(m, facts, m.supply_s)


def _change_copies(m: Measured, facts: Facts, tried: Tried) -> Change:
    best = _best(tried, m.loop_s)
    if best:
        return best, max(m.compute_s, tried[best])
    if facts.nearer_tier == "device":
        return Setting("data.tier", "device"), m.compute_s
    if facts.float_fields:
        names = ", ".join(facts.float_fields)
        factor = max(facts.float_fields.values())
        advice = f"store {names} as uint8: {factor} x fewer bytes; the transform turns them into floats on the device"
        return advice, max(m.compute_s, m.copy_s / factor, m.supply_s / factor)
    return _change_echo(m, facts, m.copy_s)


def _change_echo(m: Measured, facts: Facts, feed_s: float) -> Change:
    """Train on each pool as often as costs no time, if that is more often than now."""
    factor = round(min(facts.max_echo, facts.echo * feed_s / m.compute_s), 2)
    if factor < (1 + DEAD_BAND) * facts.echo:
        advice = "store fewer bytes per row, or use a faster machine (python convert.py info rates the file)"
        return advice, m.loop_s
    return Setting("data.echo", factor), max(m.compute_s, feed_s * facts.echo / factor)


def _change_transform(m: Measured, facts: Facts, tried: Tried) -> Change:
    best = _best(tried, m.compute_s)
    if best:
        return best, m.loop_s - m.compute_s + tried[best]
    return "make `transform` of the workload lighter, or try train.compile=true", m.loop_s - m.transform_s


def _change_syncs(m: Measured, facts: Facts, tried: Tried) -> Change:
    assert m.busy_s is not None
    loop_s = m.loop_s - m.local_s + max(m.busy_s, m.local_s - m.busy_s)
    if facts.is_fp16:  # its loss scaler asks in every step whether all gradients are finite
        return Setting("train.precision", "bf16"), loop_s
    return f"leave the value on the device at {m.syncs[0]}, and read it every log.every_steps", loop_s


def _change_launches(m: Measured, facts: Facts, tried: Tried) -> Change:
    """Use a larger batch: the host takes as long for it as for a small one."""
    assert m.busy_s is not None
    factor = min(MAX_BATCH_FACTOR, 1 << max(1, int(m.compute_s / m.busy_s).bit_length() - 1))
    while factor > 1 and m.batch_size * factor > facts.max_batch_size:
        factor //= 2
    if factor == 1:
        return "try train.compile=true: there are no rows for a larger batch", m.loop_s
    loop_s = max(m.loop_s - m.compute_s + m.compute_s / factor, m.busy_s)
    return Setting("data.batch_size", m.batch_size * factor), loop_s


def _change_communication(m: Measured, facts: Facts, tried: Tried) -> Change:
    if m.batch_size * 2 > facts.max_batch_size:
        return "use fewer ranks: there are no rows for a larger batch", m.loop_s
    return Setting("data.batch_size", m.batch_size * 2), m.loop_s - (m.compute_s - m.local_s) / 2


def _change_straggler(m: Measured, facts: Facts, tried: Tried) -> Change:
    ranks_s = m.ranks_compute_s
    min_loop_s = 0.0
    if m.supply_s >= (1 - NEAR) * m.loop_s and _describe_straggler(m.ranks_supply_s):
        ranks_s = m.ranks_supply_s
        min_loop_s = m.compute_s
    slowest_s = max(ranks_s)
    advice = f"look at the machine of rank {ranks_s.index(slowest_s)}: other processes, clocks, its disk"
    return advice, max(m.loop_s - (slowest_s - _other_ranks_s(ranks_s)), min_loop_s)


_CHANGES: Mapping[Cause, Callable[[Measured, Facts, Tried], Change]] = {
    "READ": _change_supply,
    "DECODE": _change_supply,
    "COPY": _change_copies,
    "AUGMENT": _change_transform,
    "SYNC": _change_syncs,
    "LAUNCH": _change_launches,
    "COMM": _change_communication,
    "STRAGGLER": _change_straggler,
    "COMPUTE": lambda m, facts, tried: ("nothing", m.loop_s),
}


def _best(options: Tried, now_s: float) -> Setting | None:
    """The fastest setting, if it is faster than now."""
    best = min(options, key=lambda setting: options[setting], default=None)
    return best if best and options[best] < (1 - DEAD_BAND) * now_s else None


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
