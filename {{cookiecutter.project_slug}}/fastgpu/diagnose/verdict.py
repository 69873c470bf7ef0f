"""Concludes from the measurements which part of the loop is the bottleneck, and what to change.

Reading, decoding, copying and training overlap, so the loop takes as long as the slowest of them. Each was measured
without the others (ceilings.py). The gain of a change follows from the same rule: afterwards the loop takes as long as
the slowest part that is left.

When is a cause named? Every question is about a share of some time, for instance the share of the loop's time that
compute does not need. The share is computed in each round, so that a machine that is slow for a while cancels out. A
question is answered only if the interval of its share answers it (`exceeds`). `judge` names a cause if the answers
exclude all others; if an answer is missing, the verdict is INCONCLUSIVE. The interval is from the second lowest to the
second highest of eight rounds: whatever the noise, the true median lies below it in 3.5 % of all cases (9 of 256), and
above it as often. Three rounds are enough if the loop takes more than twice as long as compute in each of them; if
eight do not tell, there are up to sixteen, whose interval leaves out two on either side (`is_enough`).

All times are seconds per optimizer step, that is for the rows of one step over all ranks, whether echoed or not.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import median, median_low
from typing import Literal, NamedTuple

from fastgpu.process.config import Tier

Cause = Literal["READ", "DECODE", "COPY", "AUGMENT", "HOST", "RANKS", "COMPUTE", "INCONCLUSIVE"]
MEANING: dict[Cause, str] = {
    "READ": "the loop waits for bytes from storage",
    "DECODE": "the loop waits until bytes have been decoded to rows",
    "COPY": "the loop waits for copies from host to device",
    "AUGMENT": "the transform takes a large part of the step",
    "HOST": "the device waits for the host",
    "RANKS": "the ranks wait for each other",
    "COMPUTE": "the device computes all the time: there is nothing to improve",
    "INCONCLUSIVE": "the measurements do not tell",
}
MAX_ECHO = 4.0  # Choi et al. found echoed batches worth almost as much as fresh ones up to about this factor
DEAD_BAND = 0.05  # smaller differences in speed do not count
NEAR = 0.1  # a part whose time is this close to that of the loop explains it
READ_SHARE = 0.5  # storage is the cause if it takes a larger part of the supply's time
AUGMENT_SHARE = 0.25  # a transform that takes a larger part of the step is worth a change
STRAGGLER_SHARE = 0.13  # a rank that takes 1.15 times as long as the others is a straggler
IDLE_SHARE = 0.2  # a device that is idle for a larger part of the step waits for the host
LAUNCH_SHARE = 2 / 3  # idle for a larger part, it waits for launches, even if the step also reads values from it
CPU_SHARE = 0.85  # where a larger part of the CPUs is used, none is left for more readers
MAX_BATCH_FACTOR = 64
NOISE_SHARE = 0.2
MIN_ROUNDS = 3
N_ROUNDS = 8
MAX_ROUNDS = 16
CLEAR_SHARE = 0.5  # a loop that loses a larger part of its time in each round needs no more of them


class Setting(NamedTuple):
    """One key of the config and a value for it. As text it is a word of the command line: `data.echo=2`."""

    key: str
    value: bool | int | float | str

    def __str__(self) -> str:
        text = f"{self.value:g}" if isinstance(self.value, float) else str(self.value).lower()
        return f"{self.key}={text}"


class Rounds(NamedTuple):
    """One quantity, measured in several rounds: seconds per step, or a share of them."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def low(self) -> float:
        """The lower end of the interval: of 16 rounds the third lowest, of 8 the second lowest, of fewer the lowest."""
        return sorted(self.values)[len(self.values) // 8]

    @property
    def high(self) -> float:
        """The upper end of the interval."""
        return sorted(self.values, reverse=True)[len(self.values) // 8]

    @property
    def noise(self) -> float:
        """Half of the interval, relative to the median."""
        return (self.high - self.low) / 2 / self.median

    def __str__(self) -> str:
        """The interval of a share. Shares below 0 are noise."""
        return f"{100 * max(0.0, self.low):.0f} to {100 * max(0.0, self.high):.0f} %"


def each_round(formula: Callable[..., float], *quantities: Rounds) -> Rounds:
    """The formula applied to the values of each round."""
    return Rounds(tuple(map(formula, *(quantity.values for quantity in quantities))))


def saved(part: Rounds, whole: Rounds) -> Rounds:
    """The share of `whole` that would be saved if it took only as long as `part`."""
    return each_round(lambda part_s, whole_s: 1 - part_s / whole_s, part, whole)


def exceeds(share: Rounds, threshold: float) -> bool | None:
    """Whether a share is above the threshold. None: its interval does not tell.

    No means at most threshold + DEAD_BAND, so that enough rounds give an answer for any share.
    """
    if share.high < threshold + DEAD_BAND:
        return False
    return True if share.low > threshold else None


class Measured(NamedTuple):
    """All measurements. None: the part does not exist here (no copies on the device tier), or it cannot be seen."""

    batch_size: int
    """Rows of one step over all ranks."""
    compute: Rounds
    """Transform and step on one batch that stays on the device, on all ranks together."""
    loop: Rounds
    """The training loop itself, in the same rounds as `compute`."""
    untransformed: Rounds | None = None
    """The step on a batch that was transformed before."""
    copy: Rounds | None = None
    """Transform and step on pools that are copied from staging memory which is filled already."""
    supply: Rounds | None = None
    """The feed, without a step behind it."""
    cached: Rounds | None = None
    """The feed of a few blocks again and again, from the page cache."""
    ranks_compute: tuple[Rounds, ...] = ()
    """Like `compute`, of each rank without averaging gradients. Empty: there is one rank."""
    ranks_supply: tuple[Rounds, ...] = ()
    busy_s: float | None = None
    """Part of a step in which the device was busy."""
    syncs: tuple[str, ...] = ()
    """Places in the code, as `file.py:12`, where the step makes the host wait for the device."""
    cpu_share: Rounds = Rounds((0.0,))
    """Share of the CPUs' time that the loop and its readers used."""

    @property
    def feed_ratio(self) -> Rounds:
        """The speed of the loop relative to `compute`. Values above 1 are noise."""
        return each_round(lambda compute_s, loop_s: compute_s / loop_s, self.compute, self.loop)

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
    def local(self) -> Rounds:
        """A step of the slowest rank, without averaging gradients."""
        return each_round(max, *self.ranks_compute) if len(self.ranks_compute) > 1 else self.compute

    @property
    def idle(self) -> Rounds | None:
        """The share of a step in which the device has nothing to do. None: it cannot be seen."""
        busy_s = self.busy_s
        return None if busy_s is None else each_round(lambda step_s: 1 - busy_s / step_s, self.local)

    @property
    def waits_for_launches(self) -> bool:
        """Whether an idle device would be busy with a larger batch, and not with a step that reads no values."""
        return not self.syncs or (self.idle is not None and self.idle.median > LAUNCH_SHARE)

    @property
    def lost(self) -> Rounds:
        """The share of the loop's time that compute alone does not need."""
        return saved(self.compute, self.loop)

    @property
    def transform(self) -> Rounds:
        """The share of `compute` that the transform takes."""
        return saved(self.untransformed or self.compute, self.compute)


class Facts(NamedTuple):
    """The facts about a run that decide which changes are possible."""

    readers_key: str = "loader.num_readers"
    """The key for the number of readers: of threads, or of worker processes."""
    n_readers: int = 1
    nearer_tier: Tier | None = None
    """The tier that data.tier=auto would choose now, if it is nearer to the device than the current one."""
    max_batch_size: int = 1 << 40
    echo: float = 1.0
    float_fields: Mapping[str, int] = {}
    """{field of floats: bytes of one value}. They may fit into one byte."""
    filters: str = ""
    """How the rows are compressed in their file."""
    is_fp16: bool = False
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
    gain: float = 1.0
    """Predicted speed of the loop after the change / its speed now."""
    certainty: Literal["high", "medium", "low"] = "low"
    """low: nothing is certain (INCONCLUSIVE). high: the cause, and the numbers to a few percent."""
    see_also: str = ""
    """Something else that would help, by an unknown factor."""
    candidates: tuple[Cause, ...] = ()
    """The causes that the measurements do not exclude, the likeliest first."""


Tried = Mapping[Setting, float]
"""{setting: seconds per step with it} of the part of the loop that the setting changes."""
Change = tuple[Setting | str, float]
"""(setting or other advice, seconds that the loop should take afterwards)"""


class Suspect(NamedTuple):
    """A cause that the measurements do not exclude. INCONCLUSIVE: one that no part shows."""

    cause: Cause
    why: str
    ranks: tuple[Rounds, ...] = ()
    """The times of the ranks, if the slowest of them is the cause."""


class _Cost(NamedTuple):
    cause: Cause
    share: Rounds
    """Share of the step that could be saved."""
    threshold: float
    where: str = ""
    ranks: tuple[Rounds, ...] = ()


def settings_to_try(cause: Cause, facts: Facts) -> list[Setting]:
    """Settings whose effect does not follow from the ceilings. Measure them, and call `judge` with the results."""
    if cause in ("READ", "DECODE"):
        return [Setting(facts.readers_key, max(1, 2 * facts.n_readers))]
    return []


def judge(m: Measured, facts: Facts, tried: Tried | None = None) -> Verdict:
    """The bottleneck, and the change that promises most.

    tried: the supply that was measured with the settings of `settings_to_try`.
    """
    suspects = find_suspects(m)
    cause, why, _ = suspects[0]
    causes = tuple(dict.fromkeys(suspect.cause for suspect in suspects))
    if causes != (cause,) or cause == "INCONCLUSIVE":
        if len(causes) > 1:
            possible = ", ".join(causes).replace("INCONCLUSIVE", "parts that slow each other down")
            why = f"the loop loses {m.lost} of its time to the feed; possible, the likeliest first: {possible}"
        advice = "run it again on a quieter machine, with larger --seconds, or look at --trace"
        candidates = tuple(each for each in causes if each != "INCONCLUSIVE")
        return Verdict("INCONCLUSIVE", why, advice, candidates=candidates)
    changes = _find_changes(suspects[0], m, facts, tried or {})
    gaining = (change for change in changes if change[1] < (1 - DEAD_BAND) * m.loop_s)
    change, changed_loop_s = next(gaining, changes[-1])
    return Verdict(
        cause,
        why,
        str(change),
        gain=max(1.0, m.loop_s / changed_loop_s),
        certainty="high" if m.feed_ratio.noise < DEAD_BAND else "medium",
        see_also=_see_also(cause, facts),
        candidates=(cause,),
    )


# ---------------------------------------------------------------------------------------------- the cause


def is_enough(m: Measured) -> bool:
    """Whether more rounds would hardly tell more."""
    n_rounds = len(m.loop.values)
    causes = {suspect.cause for suspect in find_suspects(m)}
    is_clear = len(causes) == 1 and causes != {"INCONCLUSIVE"}
    if n_rounds < N_ROUNDS:
        return n_rounds >= MIN_ROUNDS and is_clear and m.lost.low > CLEAR_SHARE
    return is_clear or n_rounds >= MAX_ROUNDS


def find_suspects(m: Measured) -> list[Suspect]:
    """The causes that the measurements do not exclude, the likeliest first."""
    loses = exceeds(m.lost, 0.0)
    if loses is None and not (m.supply or m.copy) and m.lost.high < NOISE_SHARE:
        loses = False  # the rows lie on the device: there is no feed to wait for, and this is noise
    if loses is None:
        both = [_find_in_step(m), _find_in_feed(m)]
        likely, unlikely = reversed(both) if m.lost.median > DEAD_BAND else both
        return likely + unlikely
    return _find_in_feed(m) if loses else _find_in_step(m)


def _find_in_feed(m: Measured) -> list[Suspect]:
    """Which part of the way to the device may be the slowest. `copy` includes compute; the supply includes copies."""
    copies = m.copy or m.compute
    supply = m.supply or copies
    copies_are_slower = exceeds(saved(m.compute, copies), 0.0)
    supply_is_slower = exceeds(saved(copies, supply), 0.0)
    suspects = []
    if supply_is_slower is not False and _may_explain(supply, m):
        suspects += _find_in_supply(m)
    if supply_is_slower is not True and copies_are_slower is not False and _may_explain(copies, m):
        suspects.append(Suspect("COPY", "steps with copies alone take as long as the loop"))
    is_shown = supply_is_slower or copies_are_slower
    return suspects if suspects and is_shown else suspects + _find_in_between(m)


def _may_explain(part: Rounds, m: Measured) -> bool:
    """Whether a part is not too fast to explain the time of the loop."""
    return exceeds(saved(part, m.loop), NEAR) is not True


def _find_in_supply(m: Measured) -> list[Suspect]:
    suspects = []
    if len(m.ranks_supply) > 1:
        rank, share = find_straggler(m.ranks_supply)
        is_straggler = exceeds(share, STRAGGLER_SHARE)
        if is_straggler is not False:
            suspects.append(Suspect("RANKS", f"{share} of the supply's time for rank {rank}", m.ranks_supply))
        if is_straggler:
            return suspects
    if not (m.supply and m.cached):
        return [*suspects, Suspect("DECODE", "the supply from memory takes as long as the loop")]
    storage = saved(m.cached, m.supply)
    is_read = exceeds(storage, READ_SHARE)
    why = f"{storage} of the supply's time is spent in storage"
    if is_read is not False:
        suspects.append(Suspect("READ", why))
    if not is_read:
        suspects.append(Suspect("DECODE", why))
    return suspects


def _find_in_between(m: Measured) -> list[Suspect]:
    """Why the loop takes longer than each of its parts."""
    supply_matters = m.supply and m.supply.low > m.lost.high * m.loop.high / 4
    if supply_matters and m.cpu_share.low > CPU_SHARE:
        return [Suspect("DECODE", f"supply and step share the CPUs, of which {m.cpu_share} are used")]
    factor = m.loop_s / max(m.copy_s, m.supply_s, m.compute_s)
    unknown = Suspect("INCONCLUSIVE", f"the loop takes {factor:.2f} x as long as its slowest part alone")
    in_step = _find_in_step(m)
    on_host = [suspect for suspect in in_step if suspect.cause == "HOST"]
    if on_host == in_step:
        return on_host
    return [*on_host, unknown]


def _find_in_step(m: Measured) -> list[Suspect]:
    """What may cost most of the step. COMPUTE: maybe nothing costs enough to be worth a change."""
    costs = [_Cost("AUGMENT", m.transform, AUGMENT_SHARE)]
    if len(m.ranks_compute) > 1:
        rank, share = find_straggler(m.ranks_compute)
        costs.append(_Cost("RANKS", share, STRAGGLER_SHARE, f"for rank {rank}", m.ranks_compute))
        costs.append(_Cost("RANKS", saved(m.local, m.compute), DEAD_BAND))
    if m.idle:
        if m.syncs:  # without them, the host's time and that of the device overlap
            overlap = each_round(lambda share: min(share, 1 - share), m.idle)
            costs.append(_Cost("HOST", overlap, IDLE_SHARE, f"at {', '.join(m.syncs)}"))
        if m.waits_for_launches:
            costs.append(_Cost("HOST", m.idle, IDLE_SHARE))

    costs = [cost for cost in costs if exceeds(cost.share, cost.threshold) is not False]
    costs.sort(key=lambda cost: cost.share.median, reverse=True)
    suspects = []
    for cost in costs:
        is_rival = exceeds(each_round(float.__sub__, cost.share, costs[0].share), 0.0) is not False
        if cost is costs[0] or is_rival:
            suspects.append(Suspect(cost.cause, f"{cost.share} of a step {cost.where}".rstrip(), cost.ranks))
    if not costs or not exceeds(costs[0].share, costs[0].threshold):
        suspects.append(Suspect("COMPUTE", f"the loop loses {m.lost} of its time to the feed"))
    return suspects


def find_straggler(ranks: Sequence[Rounds]) -> tuple[int, Rounds]:
    """The slowest rank, and the share of its time that the median of the others does not need."""
    rank = max(range(len(ranks)), key=lambda rank: ranks[rank].median)
    others = each_round(lambda *times_s: median_low(sorted(times_s)[:-1]), *ranks)
    return rank, saved(others, ranks[rank])


# ---------------------------------------------------------------------------------------------- the change


def _find_changes(suspect: Suspect, m: Measured, facts: Facts, tried: Tried) -> list[Change]:
    """What could be changed. The first change that gains something is advised; if none does, the last one."""
    cause = suspect.cause
    if cause in ("READ", "DECODE", "COPY"):
        return _find_feed_changes(cause, m, facts, tried)
    if cause == "AUGMENT":
        advice = "make `transform` of the workload lighter, or try train.compile=true"
        return [(advice, _with_step(m, (1 - m.transform.median) * m.compute_s))]
    if cause == "HOST":
        return _find_host_changes(m, facts)
    if cause == "RANKS":
        return _find_ranks_changes(suspect.ranks, m, facts)
    return [("nothing", m.loop_s)]


def _find_host_changes(m: Measured, facts: Facts) -> list[Change]:
    local_s = m.local.median
    busy_s = m.busy_s or m.compute_s
    if m.waits_for_launches:  # the host takes as long for a large batch as for a small one
        factor = min(MAX_BATCH_FACTOR, 1 << max(1, int(m.compute_s / busy_s).bit_length() - 1))
        while factor > 1 and m.batch_size * factor > facts.max_batch_size:
            factor //= 2
        if factor == 1:
            return [("try train.compile=true: there are no rows for a larger batch", m.loop_s)]
        return [(Setting("data.batch_size", m.batch_size * factor), max(busy_s, _with_step(m, m.compute_s / factor)))]
    loop_s = _with_step(m, m.compute_s - local_s + max(busy_s, local_s - busy_s))
    if facts.is_fp16:  # its loss scaler asks in every step whether all gradients are finite
        return [(Setting("train.precision", "bf16"), loop_s)]
    return [(f"leave the value on the device at {m.syncs[0]}, and read it every log.every_steps", loop_s)]


def _find_ranks_changes(ranks: Sequence[Rounds], m: Measured, facts: Facts) -> list[Change]:
    """ranks: the times of the ranks, if one of them is slow; empty if they wait for each other's gradients."""
    local_s = m.local.median
    if ranks:
        rank, share = find_straggler(ranks)
        loop_s = _with_step(m, m.compute_s - share.median * local_s)
        if ranks is m.ranks_supply:
            loop_s = max(m.loop_s - share.median * m.supply_s, m.compute_s)
        return [(f"look at the machine of rank {rank}: other processes, clocks, its disk", loop_s)]
    if m.batch_size * 2 > facts.max_batch_size:
        return [("use fewer ranks: there are no rows for a larger batch", m.loop_s)]
    return [(Setting("data.batch_size", m.batch_size * 2), _with_step(m, (m.compute_s + local_s) / 2))]


def _find_feed_changes(cause: Cause, m: Measured, facts: Facts, tried: Tried) -> list[Change]:
    behind_s = m.compute_s if cause == "COPY" else max(m.compute_s, m.copy_s)
    feed_s = m.copy_s if cause == "COPY" else m.supply_s
    shares_cpus = feed_s < (1 - NEAR) * m.loop_s  # the supply is fast enough alone, but takes CPUs from the step
    changes: list[Change] = []
    if not shares_cpus:
        changes += [(setting, max(behind_s, step_s)) for setting, step_s in tried.items()]
    if facts.nearer_tier:
        tier_s = m.compute_s if facts.nearer_tier == "device" else max(m.compute_s, m.copy_s)
        changes.append((Setting("data.tier", facts.nearer_tier), tier_s))
    changes.sort(key=lambda change: change[1])
    if cause == "COPY" and facts.float_fields:
        names = ", ".join(facts.float_fields)
        factor = max(facts.float_fields.values())
        advice = f"store {names} as uint8: {factor} x fewer bytes; the transform turns them into floats on the device"
        changes.append((advice, max(m.compute_s, m.copy_s / factor, m.supply_s / factor)))
    if shares_cpus and 2 * facts.echo <= MAX_ECHO:
        changes.append((Setting("data.echo", 2 * facts.echo), (m.compute_s + m.loop_s) / 2))
    echo = round(min(MAX_ECHO, facts.echo * feed_s / m.compute_s), 2)
    if echo > (1 + DEAD_BAND) * facts.echo:
        changes.append((Setting("data.echo", echo), max(m.compute_s, feed_s * facts.echo / echo)))
    advice = "store fewer bytes per row, or use a faster machine (python convert.py info rates the file)"
    return [*changes, (advice, m.loop_s)]


def _with_step(m: Measured, step_s: float) -> float:
    """Seconds of the loop if compute took that long."""
    return max(0.0, m.loop_s - m.compute_s) + step_s


def _see_also(cause: Cause, facts: Facts) -> str:
    if cause == "DECODE" and facts.repack_command:
        return f"decode once instead of in each epoch: {facts.repack_command}"
    if cause == "DECODE" and facts.filters:
        return f"store the rows without {facts.filters}: python convert.py repack"
    if cause == "READ":
        return "a faster disk, or blocks of 2 MiB (python convert.py info)"
    if cause in ("COMPUTE", "HOST"):
        return ", ".join(map(str, facts.faster))
    return ""
