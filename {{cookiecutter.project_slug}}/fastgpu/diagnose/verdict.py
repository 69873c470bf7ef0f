"""Concludes from the measurements which part of the loop is the bottleneck, and what to change.

Reading, decoding, copying and training overlap, so the loop takes as long as the longest part. Each part was
measured without the others (ceilings.py). The gain of a change follows from the same rule: after the change, the loop
takes as long as the longest part.

Every question is about a share of some time, such as the share of the loop's time that compute does not need. The share
is computed in each round, so that a machine that is slow for a while cancels out. A question is answered only if the
whole interval of the share is on one side (`exceeds`). A cause is named if the answers exclude all others; otherwise
the verdict is INCONCLUSIVE. For any kind of noise, the true median is below the interval of five rounds in 3.1 % of all
cases (1 of 32), of eight rounds in 3.5 % (9 of 256), and above the interval as often.

All times are seconds per optimizer step, that is for the rows of one step over all ranks, whether echoed or not.
"""

from collections.abc import Callable, Sequence
from math import log2
from statistics import median, median_low
from typing import Literal, NamedTuple

Cause = Literal["READ", "DECODE", "COPY", "AUGMENT", "HOST", "RANKS", "COMPUTE", "LOADER", "INCONCLUSIVE"]
ADVICE: dict[Cause, str] = {
    "READ": "data.tier=auto; a disk of this machine, or blocks of 2 MiB (python convert.py repack writes them)",
    "DECODE": "decode once instead of in each epoch: python convert.py dataset, or repack; more CPUs",
    "COPY": "data.tier=auto; floats stored as uint8; nvidia-smi -q shows missing PCIe lanes and held-down clocks",
    "AUGMENT": "a lighter transform of the workload: fewer operations, each on a whole batch, in uint8 if possible",
    "HOST": "train.compile=true; bf16 instead of fp16, whose loss scaler reads a value in each step",
    "RANKS": "fewer ranks; of a slow rank, the other processes, clocks and disk of its machine",
    "COMPUTE": "nothing but the step itself: train.compile=true and train.precision=bf16 may make it faster",
    "LOADER": "its own documentation: more worker processes, kept from epoch to epoch; pinned memory; larger batches",
    "INCONCLUSIVE": "run it again on a quieter machine, with larger --seconds, or look at --trace",
}
OF_BUCKET = "data.tier=auto; a later epoch, which finds the files in data.cache if that has room for them"
"""The advice for READ if blocks came from a bucket."""
MAX_ECHO = 4.0  # Choi et al. found echoed batches worth almost as much as fresh ones up to about this factor
DEAD_BAND = 0.05  # smaller differences in speed do not count
NEAR = 0.1  # a part whose time is this close to the time of the loop explains it
READ_SHARE = 0.5  # storage is the cause if it takes a larger part of the supply's time
AUGMENT_SHARE = 0.25  # a transform that takes a larger part of the step is worth a change
STRAGGLER_SHARE = 0.13  # a rank that needs 15 % more time than the others is a straggler
IDLE_SHARE = 0.2  # a device that is idle for a larger part of the step waits for the host
CPU_SHARE = 0.85  # where a larger part of the CPUs is used, none is left for more readers
CLEAR_SHARE = 0.5  # a loop that loses a larger part of its time in each round needs no more of them
MIN_ROUNDS = 2
N_ROUNDS = 5
MAX_ROUNDS = 16


class Rounds(tuple[float, ...]):
    """One quantity, measured in several rounds: seconds per step, or a share of them."""

    @property
    def median(self) -> float:
        return median(self)

    @property
    def low(self) -> float:
        """The lower end of the interval: of 16 rounds the third lowest, of 8 the second lowest, of fewer the lowest."""
        return sorted(self)[len(self) // 8]

    @property
    def high(self) -> float:
        """The upper end of the interval."""
        return sorted(self, reverse=True)[len(self) // 8]

    def __str__(self) -> str:
        """The interval of a share. Shares below 0 are noise."""
        return f"{100 * max(0.0, self.low):.0f} to {100 * max(0.0, self.high):.0f} %"


def each_round(formula: Callable[..., float], *quantities: Rounds) -> Rounds:
    """The formula applied to the values of each round."""
    return Rounds(map(formula, *quantities))


def saved(part: Rounds, whole: Rounds) -> Rounds:
    """The share of `whole` that would be saved if it took only as long as `part`."""
    return each_round(lambda part_s, whole_s: 1 - part_s / whole_s, part, whole)


def exceeds(share: Rounds, threshold: float) -> bool | None:
    """Whether a share is above the threshold. None: its interval allows both answers.

    False means at most threshold + DEAD_BAND, so that enough rounds give an answer for any share.
    """
    if share.high < threshold + DEAD_BAND:
        return False
    return True if share.low > threshold else None


class Measured(NamedTuple):
    """All measurements. None: this run has no such part (no copies on the device tier), or it cannot be measured."""

    batch_size: int
    """Rows of one step over all ranks."""
    compute: Rounds
    """Transform and step on one batch that stays on the device, on all ranks together."""
    loop: Rounds
    """The training loop itself, in the same rounds as `compute`."""
    untransformed: Rounds | None = None
    """The step on a batch that was transformed before."""
    copy: Rounds | None = None
    """Copies of pools from staging memory to the device."""
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
    is_other: bool = False
    """Whether train.py has a loader of the user's own, so that the parts of the supply are unknown."""
    is_uncached: bool = False
    """Whether files larger than the memory are read around the page cache, so that there is no `cached`."""
    is_fetched: bool = False
    """Whether blocks came over the network while the supply was measured."""
    waiting: Rounds | None = None
    """Share of the supply's time in which the workers of a torch Dataset wait, for example for a disk."""

    @property
    def lost(self) -> Rounds:
        """The share of the loop's time that compute alone does not need: 1 - the feed ratio. Below 0, it is noise."""
        return saved(self.compute, self.loop)

    @property
    def feed_ratio(self) -> float:
        """The speed of the loop / that of compute alone. The loop includes compute: above 1, it is noise."""
        return self.of_compute(self.loop)

    def of_compute(self, part: Rounds) -> float:
        """The speed of a part / the speed of compute: the median of the rounds."""
        return each_round(float.__truediv__, self.compute, part).median

    @property
    def copied(self) -> Rounds:
        """The longer one of compute and copies, which overlap."""
        return each_round(max, self.compute, self.copy) if self.copy else self.compute

    @property
    def local(self) -> Rounds:
        """A step of the slowest rank, without averaging gradients."""
        return each_round(max, *self.ranks_compute) if len(self.ranks_compute) > 1 else self.compute

    @property
    def transform(self) -> Rounds:
        """The share of `compute` that the transform takes."""
        return saved(self.untransformed or self.compute, self.compute)


class Verdict(NamedTuple):
    """One cause and one change."""

    cause: Cause
    why: str
    change: str = ""
    """The change that should help most: a setting as `key=value`, or a place to look at. Empty: no change."""
    gain: float = 1.0
    """Predicted speed of the loop after the change / its speed now."""
    free_echo: float | None = None
    """If the loop waits for rows: the data.echo with which training takes as long as loading the next rows."""


class Suspect(NamedTuple):
    """A cause that the measurements do not exclude. INCONCLUSIVE: no single part explains the loss."""

    cause: Cause
    why: str
    share: Rounds = Rounds((0.0,))
    """Share of a step, or of a slow rank's supply, that would be saved without it."""
    limit: float = 0.0
    """A share above this limit is worth a change."""
    change: str = ""
    saved_s: float = 0.0
    """Seconds of a step that the change should save."""


def advice(cause: Cause, m: Measured) -> str:
    """Where to look in addition to the change."""
    return OF_BUCKET if cause == "READ" and m.is_fetched else ADVICE[cause]


def judge(m: Measured, echo: float = 1.0, readers: tuple[str, float] | None = None) -> Verdict:
    """The bottleneck, and the change that promises most.

    echo: data.echo of the loop. readers: (setting, seconds per step of the supply with it) for twice as many readers.
    None: not tried.
    """
    suspects = find_suspects(m)
    causes = list(dict.fromkeys(suspect.cause for suspect in suspects))
    first = suspects[0]
    cause, why = first.cause, first.why
    if len(causes) > 1:
        possible = ", ".join(causes).replace("INCONCLUSIVE", "parts that slow each other down")
        cause = "INCONCLUSIVE"
        why = f"the loop loses {m.lost} of its time to the feed; possible, the likeliest first: {possible}"
        if not {*causes} <= {"READ", "DECODE"}:  # the same changes help against both
            return Verdict(cause, why)
    change, loop_s = first.change, m.loop.median - first.saved_s
    free_echo = None
    if first.cause in ("READ", "DECODE", "COPY"):
        free_echo = round(min(MAX_ECHO, echo / m.feed_ratio), 2)
        change, loop_s = _find_feed_change(m, readers, echo, free_echo)
    if loop_s >= (1 - DEAD_BAND) * m.loop.median:
        change, loop_s = "", m.loop.median
    return Verdict(cause, why, change, m.loop.median / loop_s, free_echo)


# ---------------------------------------------------------------------------------------------- the cause


def is_enough(m: Measured) -> bool:
    """Whether more rounds would hardly change the verdict."""
    n_rounds = len(m.loop)
    causes = {suspect.cause for suspect in find_suspects(m)}
    if len(causes) > 1 or causes == {"INCONCLUSIVE"}:
        return n_rounds >= MAX_ROUNDS
    return n_rounds >= N_ROUNDS or (n_rounds >= MIN_ROUNDS and m.lost.low > CLEAR_SHARE)


def find_suspects(m: Measured) -> list[Suspect]:
    """The causes that the measurements do not exclude, the likeliest first."""
    loses = exceeds(m.lost, 0.0)
    if loses is None and not m.supply:
        loses = False  # the rows are on the device: there is no feed to wait for
    if loses is None:
        in_step, in_feed = _find_in_step(m), _find_in_feed(m)
        return in_feed + in_step if m.lost.median > DEAD_BAND else in_step + in_feed
    return _find_in_feed(m) if loses else _find_in_step(m)


def _find_in_feed(m: Measured) -> list[Suspect]:
    """The causes on the way of the rows to the device that are not excluded."""
    supply = m.supply or m.copied
    supply_is_slower = exceeds(saved(m.copied, supply), 0.0)  # the supply includes copies
    copies_are_slower = exceeds(saved(m.compute, m.copied), 0.0)
    suspects = []
    if supply_is_slower is not False and _may_explain(supply, m):
        suspects += _find_in_supply(m)
    if supply_is_slower is not True and copies_are_slower is not False and _may_explain(m.copied, m):
        suspects.append(Suspect("COPY", "copies alone take as long as the loop"))
    if suspects and (supply_is_slower or copies_are_slower):
        return suspects
    return suspects + _find_in_between(m)


def _may_explain(part: Rounds, m: Measured) -> bool:
    """Whether a part is not too fast to explain the time of the loop."""
    return exceeds(saved(part, m.loop), NEAR) is not True


def _find_in_supply(m: Measured) -> list[Suspect]:
    suspects = []
    if m.supply and len(m.ranks_supply) > 1:
        straggler = _straggler(m.ranks_supply, m.supply, "the time of the supply", behind=m.compute)
        is_straggler = exceeds(straggler.share, straggler.limit)
        if is_straggler:
            return [straggler]
        if is_straggler is None:
            suspects.append(straggler)
    if m.is_other:
        return [*suspects, Suspect("LOADER", "the loader of train.py alone takes as long as the loop")]
    if m.is_uncached and m.cpu_share.low < CPU_SHARE:
        return [*suspects, Suspect("READ", "the files are larger than the memory, and the CPUs wait for the disk")]
    if m.supply and m.cached:
        storage = saved(m.cached, m.supply)
        why = f"{storage} of the time of the supply is spent in {'the network' if m.is_fetched else 'storage'}"
    elif m.waiting:
        storage = m.waiting
        why = f"the Dataset's workers wait, as for a disk or a network, for {storage} of their time"
    else:
        return [*suspects, Suspect("DECODE", "the supply from memory takes as long as the loop")]
    is_read = exceeds(storage, READ_SHARE)
    if is_read is not False:
        suspects.append(Suspect("READ", why))
    if not is_read:
        suspects.append(Suspect("DECODE", why))
    return suspects


def _find_in_between(m: Measured) -> list[Suspect]:
    """Why the loop takes longer than each of its parts."""
    supply_matters = m.supply and m.supply.low > m.lost.high * m.loop.high / 4
    if supply_matters and m.cpu_share.low > CPU_SHARE:
        return [Suspect("DECODE", f"supply and step share the CPUs, and {m.cpu_share} of the CPUs are used")]
    in_step = _find_in_step(m)
    if all(suspect.cause == "HOST" for suspect in in_step):
        return in_step  # a host that is late with its launches is late with the feed's work, too
    return [Suspect("INCONCLUSIVE", "the loop takes longer than each of its parts")]


def _find_in_step(m: Measured) -> list[Suspect]:
    """The causes inside the step that may cost most. COMPUTE: no cost may be large enough for a change."""
    share = m.transform
    saved_s = share.median * m.compute.median
    why = f"the transform takes {share} of a step"
    costs = [Suspect("AUGMENT", why, share, AUGMENT_SHARE, "make `transform` lighter", saved_s)]
    if len(m.ranks_compute) > 1:
        costs += [_gradients(m), _straggler(m.ranks_compute, m.compute, "a step")]
    if m.busy_s is not None:
        costs.append(_host(m, m.busy_s))
    costs = [cost for cost in costs if exceeds(cost.share, cost.limit) is not False]
    costs.sort(key=lambda cost: cost.share.median, reverse=True)
    suspects = []
    for cost in costs:
        difference = each_round(float.__sub__, cost.share, costs[0].share)
        if cost is costs[0] or exceeds(difference, 0.0) is not False:  # it may be as large as the largest
            suspects.append(cost)
    if not costs or not exceeds(costs[0].share, costs[0].limit):
        why = f"the loop loses {m.lost} of its time to the feed"
        if not m.supply and exceeds(m.lost, 0.0) is None:
            why = f"the rows are on the device, so the loss of {m.lost} is not the feed"
        suspects.append(Suspect("COMPUTE", why))
    return suspects


def _gradients(m: Measured) -> Suspect:
    """The ranks wait for each other's gradients: half as often with twice the rows."""
    share = saved(m.local, m.compute)
    saved_s = share.median * m.compute.median / 2
    change = f"data.batch_size={2 * m.batch_size}"
    return Suspect("RANKS", f"averaging gradients takes {share} of a step", share, DEAD_BAND, change, saved_s)


def _straggler(ranks: Sequence[Rounds], whole: Rounds, name: str, behind: Rounds | None = None) -> Suspect:
    """The slowest rank takes longer than the median of the other ranks, and than `behind`, the part after it."""
    rank = max(range(len(ranks)), key=lambda rank: ranks[rank].median)
    left = each_round(lambda *times_s: median_low(sorted(times_s)[:-1]), *ranks)
    if behind:
        left = each_round(max, left, behind)
    share = each_round(lambda rank_s, left_s, whole_s: (rank_s - left_s) / whole_s, ranks[rank], left, whole)
    change = f"look at the machine of rank {rank}"
    saved_s = share.median * whole.median
    return Suspect("RANKS", f"rank {rank} alone causes {share} of {name}", share, STRAGGLER_SHARE, change, saved_s)


def _host(m: Measured, busy_s: float) -> Suspect:
    """The device is idle although it has the batch: it waits for launches, or the host waits for its values."""
    share = each_round(lambda local_s, step_s: (local_s - busy_s) / step_s, m.local, m.compute)
    idle_s = share.median * m.compute.median
    why = f"the device is idle for {share} of a step"
    if m.syncs:  # without them, host and device overlap
        why += f", and the host waits for it at {', '.join(m.syncs)}"
        change = f"leave the value on the device at {m.syncs[0]}, and read it every log.every_steps"
        saved_s = min(idle_s, busy_s)
    else:  # the host takes as long for a large batch as for a small one
        factor = 1 << int(log2(max(2.0, m.compute.median / busy_s)))
        change = f"data.batch_size={factor * m.batch_size}"
        saved_s = min(idle_s, (1 - 1 / factor) * m.compute.median)
    return Suspect("HOST", why, share, IDLE_SHARE, change, saved_s)


# ---------------------------------------------------------------------------------------------- the change


def _find_feed_change(
    m: Measured, readers: tuple[str, float] | None, echo: float, free_echo: float
) -> tuple[str, float]:
    """More readers, otherwise the echo that costs no time; and the seconds of the loop afterwards."""
    loop_s, compute_s = m.loop.median, m.compute.median
    feed_s = max(part.median for part in (m.copied, m.supply) if part)
    shares_cpus = feed_s < (1 - NEAR) * loop_s and m.cpu_share.median > CPU_SHARE  # it takes them from the step
    if readers and not shares_cpus:
        setting, supply_s = readers
        left_s = max(m.copied.median, supply_s)
        if left_s < (1 - DEAD_BAND) * loop_s:
            return setting, left_s
    fresh_share = echo / free_echo
    echoed_s = compute_s + fresh_share * (loop_s - compute_s) if shares_cpus else max(compute_s, fresh_share * loop_s)
    return f"data.echo={free_echo:g}", echoed_s
