import json
import re
from typing import Any

import numpy as np
import pytest

from fastgpu.diagnose import result
from fastgpu.diagnose.verdict import ADVICE, Measured, Rounds, is_enough, judge


def quiet(step_s: float) -> Rounds:
    """Rounds that differ by 1 %, all parts in the same way."""
    return Rounds((step_s, 0.99 * step_s, 1.01 * step_s))


TIMINGS = ("compute", "loop", "untransformed", "copy", "supply", "cached")


def measured(compute_s: float, loop_s: float, **others: Any) -> Measured:
    """Measurements on a quiet machine. others: fields of `Measured`; seconds of a part become its timing."""
    fields = {}
    for name, value in others.items():
        if name.startswith("ranks_"):
            fields[name] = tuple(map(quiet, value))
        else:
            fields[name] = quiet(value) if name in TIMINGS else value
    return Measured(64, quiet(compute_s), quiet(loop_s), **fields)


SLOW_DISK = measured(1.0, 4.0, supply=4.0, cached=0.5)
FAST = {"supply": 0.9, "cached": 0.9}
BUSY = {"cpu_share": Rounds((0.95,) * 3)}
SYNC = {"syncs": ("mine.py:3",)}
CASES = [  # (measurements, what could be changed, cause, a part of the change, its gain)
    (measured(1.0, 1.01, supply=0.2, cached=0.2), {}, "COMPUTE", "", 1.0),
    (SLOW_DISK, {"readers": ("loader.num_readers=4", 2.0)}, "READ", "loader.num_readers=4", 2.0),
    (SLOW_DISK, {"readers": ("loader.num_readers=4", 3.95)}, "READ", "data.echo=4", 4.0),
    (measured(1.0, 4.0, supply=3.5), {"readers": ("loader.num_workers=4", 2.0)}, "DECODE", "loader.num_workers=4", 2.0),
    (measured(1.0, 4.0, supply=4.0, waiting=Rounds((0.95, 0.9))), {}, "READ", "data.echo=4", 4.0),
    (measured(1.0, 4.0, supply=4.0, waiting=Rounds((0.1, 0.05))), {}, "DECODE", "data.echo=4", 4.0),
    (measured(1.0, 4.0, supply=4.0, cached=3.9), {}, "DECODE", "data.echo=4", 4.0),
    (measured(1.0, 4.0, supply=4.0)._replace(is_uncached=True), {}, "READ", "data.echo=4", 4.0),
    (measured(1.0, 3.0, supply=3.0, cached=0.5), {"echo": 2.0}, "READ", "data.echo=4", 2.0),
    (measured(1.0, 9.0, supply=9.0, cached=0.5), {}, "READ", "data.echo=4", 4.0),
    (measured(1.0, 3.0, copy=3.0, supply=3.0), {}, "COPY", "data.echo=3", 3.0),
    (measured(1.0, 1.0, copy=0.9, supply=0.95), {}, "COMPUTE", "", 1.0),
    (measured(1.0, 1.0, busy_s=0.1, untransformed=0.6), {}, "HOST", "data.batch_size=512", 8.0),
    (measured(1.0, 1.0, busy_s=0.6, **SYNC), {}, "HOST", "mine.py:3", 1 / 0.6),
    (measured(1.0, 1.0, busy_s=0.3, **SYNC), {}, "HOST", "mine.py:3", 1 / 0.7),
    (measured(1.0, 1.0, busy_s=0.95, **SYNC), {}, "COMPUTE", "", 1.0),
    (measured(1.0, 1.0, untransformed=0.6), {}, "AUGMENT", "transform", 1 / 0.6),
    (measured(1.0, 1.0, ranks_compute=(0.5, 1.0)), {}, "RANKS", "rank 1", 2.0),
    (measured(1.0, 1.0, ranks_compute=(0.5, 1.0, 0.9)), {}, "RANKS", "rank 1", 2.0),
    (measured(1.0, 4.0, supply=4.0, cached=4.0, ranks_supply=(4.0, 2.0)), {}, "RANKS", "rank 0", 2.0),
    (measured(1.0, 4.0, supply=4.0, cached=4.0, ranks_supply=(4.0, 0.5)), {}, "RANKS", "rank 0", 4.0),
    (measured(1.0, 1.0, ranks_compute=(0.6, 0.6)), {}, "RANKS", "data.batch_size=128", 1.25),
    (measured(1.0, 1.8, **FAST, **BUSY), {}, "DECODE", "data.echo=1.8", 1.8 / (1 + 0.8 / 1.8)),
    (measured(1.0, 1.8, supply=0.05, cached=0.05, **BUSY), {}, "INCONCLUSIVE", "", 1.0),
    (measured(1.0, 1.8, **FAST), {}, "INCONCLUSIVE", "", 1.0),
    (measured(1.0, 1.8, **FAST, busy_s=0.1), {}, "HOST", "data.batch_size=512", 1.8 / 0.925),
]
N_TRIES = 200


@pytest.mark.parametrize(("m", "options", "cause", "change", "gain"), CASES)
def test_verdict_has_one_cause_and_one_change(m, options, cause, change, gain):
    verdict = judge(m, **options)
    assert verdict.cause == cause
    assert ADVICE[cause]
    assert change in verdict.change if change else not verdict.change
    assert verdict.gain == pytest.approx(gain, rel=0.02)
    rng = np.random.default_rng(0)
    named = [judge(disturbed(m, rng, 0.01), **options).cause for _ in range(N_TRIES)]
    assert named.count(cause) > 0.9 * N_TRIES, "a little noise hides the cause"


def test_verdict_names_the_network():
    assert judge(SLOW_DISK).why.endswith("is spent in storage")
    assert judge(SLOW_DISK._replace(is_fetched=True)).why.endswith("is spent in the network")


def test_verdict_names_the_free_echo():
    assert judge(SLOW_DISK, readers=("loader.num_readers=4", 1.0)).free_echo == 4.0
    assert judge(measured(1.0, 2.5, supply=2.5, cached=0.5)).free_echo == 2.5
    assert judge(measured(1.0, 1.0, untransformed=0.6)).free_echo is None
    loop = Rounds((0.02, 0.06, 0.05))
    noisy = Measured(64, Rounds((0.01, 0.02, 0.03)), loop, supply=loop, cached=Rounds((0.001,) * 3))
    assert (noisy.feed_ratio, judge(noisy).free_echo) == (0.5, 2.0)  # of one estimator: of the medians, it is 2.5


def disturbed(m: Measured, rng: np.random.Generator, noise: float) -> Measured:
    """The same measurements in eight rounds of a machine that is disturbed by this share, never for the better."""

    def redraw(timing: Rounds | None) -> Rounds | None:
        return timing and Rounds(timing.median * (1 + noise * rng.exponential(size=8)))

    fields: dict[str, Any] = {name: redraw(getattr(m, name)) for name in TIMINGS}
    for name in ("ranks_compute", "ranks_supply"):
        fields[name] = tuple(map(redraw, getattr(m, name)))
    busy_s = m.busy_s and m.busy_s * (1 + noise * np.log(2))  # as the median of the steps is
    return m._replace(**fields, busy_s=busy_s, cpu_share=Rounds(m.cpu_share[:1] * 8))


FALSE_SHARE = 9 / 256
FED = {"supply": 0.2, "cached": 0.2}
NEAR_A_LIMIT = [  # (measurements, cause): a small change would make another cause right
    (measured(1.0, 1.06, **FED), "INCONCLUSIVE"),  # the loop loses 5.7 % and no part explains it
    (measured(1.0, 1.3, supply=0.99, cached=0.1), "INCONCLUSIVE"),
    (measured(1.0, 1.0, **FED, untransformed=0.69), "AUGMENT"),
    (measured(1.0, 1.0, **FED, untransformed=0.751), "COMPUTE"),
    (measured(1.0, 2.0, supply=2.0, cached=0.89), "READ"),
    (measured(1.0, 2.0, supply=2.0, cached=1.01), "DECODE"),
    (measured(1.0, 2.0, copy=2.0, supply=2.0, cached=0.1), "COPY"),
    (measured(1.0, 2.2, copy=2.0, supply=2.15, cached=0.1), "READ"),
    (measured(1.0, 1.0, **FED, busy_s=0.74), "HOST"),
    (measured(1.0, 1.0, **FED, busy_s=0.81), "COMPUTE"),
    (measured(1.0, 1.0, **FED, ranks_compute=(0.8, 1.0)), "RANKS"),
    (measured(1.0, 1.0, **FED, ranks_compute=(0.88, 1.0)), "COMPUTE"),
]


@pytest.mark.parametrize("noise", [0.03, 0.3, 1.0])
@pytest.mark.parametrize(("m", "right"), [(m, cause) for m, _, cause, *_ in CASES] + NEAR_A_LIMIT)
def test_verdict_is_wrong_at_most_once_in_28(m, right, noise):
    """Whatever the noise, and also where the truth is at the limit of two causes."""
    rng = np.random.default_rng(0)
    named = [judge(disturbed(m, rng, noise)).cause for _ in range(N_TRIES)]
    false = [cause for cause in named if cause not in (right, "INCONCLUSIVE")]
    three_sigma = 3 * (FALSE_SHARE * N_TRIES) ** 0.5
    assert len(false) < FALSE_SHARE * N_TRIES + three_sigma, set(false)


SLOW = Rounds((3.5, 4.5, 2.9, 5.5))
LOADED = Measured(  # the median says that the loop is fed, and the loop may have half of its speed
    64,
    compute=Rounds((0.5, 0.6, 0.5, 0.55, 0.65, 0.5, 0.6, 0.5)),
    loop=Rounds((1.0, 0.4, 0.5, 0.5, 1.2, 0.45, 0.4, 0.6)),
)
FAST_FEED = Rounds((0.001,) * 8)
UNEVEN = Measured(64, Rounds((1.0,) * 4), SLOW, supply=SLOW, cached=Rounds((1.0, 3.0, 1.2, 3.5)))


@pytest.mark.parametrize(
    ("m", "cause", "why"),
    [
        (
            LOADED._replace(supply=FAST_FEED, cached=FAST_FEED),
            "INCONCLUSIVE",
            "loses 0 to 4.* COMPUTE, parts that slow each other down$",
        ),
        (LOADED, "COMPUTE", "^the rows are on the device, so the loss of 0 to 46 % is not the feed"),
        (measured(1.0, 2.0), "INCONCLUSIVE", "the loop takes longer"),
    ],
)
def test_verdict_none_from_wide_intervals(m, cause, why):
    verdict = judge(m)
    assert (verdict.cause, verdict.change, verdict.gain) == (cause, "", 1.0)
    assert re.search(why, verdict.why), verdict.why


def test_verdict_read_or_decode_names_what_helps_both():
    verdict = judge(UNEVEN, readers=("loader.num_readers=4", SLOW.median / 2))
    assert verdict.cause == "INCONCLUSIVE"
    assert "the likeliest first: READ, DECODE" in verdict.why
    assert (verdict.change, verdict.gain) == ("loader.num_readers=4", pytest.approx(2))


@pytest.mark.parametrize(
    ("compute_s", "loop_s", "n_rounds"),
    [
        ([1.0] * 16, [12.0] * 16, 2),  # clear at once
        ([1.0] * 16, [1.6] * 16, 5),
        ([9.0, *[1.0] * 15], [12.0] * 16, 5),  # a round that was disturbed costs three more
        ([20.0, *[1.0] * 15], [12.0] * 16, 8),
        ([1.0, 2.0] * 8, [1.5] * 16, 16),
    ],
)
def test_verdict_ends_measuring_when_intervals_part(compute_s, loop_s, n_rounds):
    def after(n: int) -> Measured:
        loop = Rounds(tuple(loop_s[:n]))
        return Measured(64, Rounds(tuple(compute_s[:n])), loop, supply=loop)

    assert next(n for n in range(1, 17) if is_enough(after(n))) == n_rounds


def test_verdict_table_and_json():
    slow = Measured(64, *(Rounds((step_s,) * 3) for step_s in (0.01, 0.04)), supply=Rounds((0.04,) * 3))
    verdict = judge(slow, readers=("loader.num_readers=4", 0.005))
    shown = " ".join(result.table("title", slow, verdict).split())
    for part in (
        "title each part alone ms per step from - to rows/s of compute compute 10.000 10.000 - 10.000 6,400 1.00 x ",
        " supply 40.000 40.000 - 40.000 1,600 0.25 x the training loop 40.000 40.000 - 40.000 1,600 0.25 x ",
        " feed ratio 0.25, the feed costs 75 to 75 % of the time DECODE: ",
        " change loader.num_readers=4 gain 4.00 x the speed, predicted: 6,400 rows/s echo data.echo=4 ",
    ):
        assert part in shown
    numbers = json.loads(json.dumps(result.as_json("title", slow, verdict)))
    assert (numbers["feed_ratio"], numbers["supply"]) == (0.25, [0.04] * 3)
    assert numbers["verdict"] == verdict._asdict()
    echoed = result.table("title", slow, judge(slow))  # not twice, and it says what it counts
    assert echoed.count("data.echo=") == 1
    assert "predicted: 6,400 rows/s, repeated ones included" in echoed


def test_verdict_advice_on_a_bucket():
    m = Measured(64, *(Rounds((step_s,) * 3) for step_s in (0.01, 0.04)), supply=Rounds((0.04,) * 3))
    m = m._replace(cached=Rounds((0.01,) * 3))
    for is_fetched in (False, True):
        slow = m._replace(is_fetched=is_fetched)
        last = result.table("title", slow, judge(slow)).splitlines()[-1]
        assert last.startswith("  see also  data.tier=auto; ")
        assert ("data.cache" in last) == is_fetched


def test_verdict_table_has_one_feed_ratio():
    """The median of the ratios of each round, and not the ratio of medians, 1.00."""
    m = Measured(64, compute=Rounds((0.01, 0.02, 0.04)), loop=Rounds((0.02, 0.04, 0.01)), supply=Rounds((0.01,) * 3))
    lines = result.table("title", m, judge(m)).splitlines()
    (loop,) = [line for line in lines if "the training loop" in line]
    assert loop.endswith(" 0.50 x")
    assert "feed ratio 0.50, " in "\n".join(lines)


@pytest.mark.parametrize(
    ("untransformed_s", "shown"), [((0.5, 0.6, 1.1), "below the noise"), ((0.5, 0.6, 0.5), "500.000")]
)
def test_verdict_transform_within_the_noise_has_no_number(untransformed_s, shown):
    m = measured(1.0, 1.0)._replace(compute=Rounds((1.0,) * 3), untransformed=Rounds(untransformed_s))
    assert f"  transform, part of compute  {shown:>12}\n" in result.table("title", m, judge(m))


def test_verdict_loop_faster_than_compute():
    """The raw numbers are in the JSON values."""
    loop = Rounds((0.0094, 0.0097, 0.01, 0.0097))
    noisy = Measured(64, Rounds((0.01,) * 4), loop, supply=Rounds((1e-4, 1e-4, 2e-2, 1e-4)), busy_s=0.009)
    verdict = judge(noisy)
    text = result.table("title", noisy, verdict)
    assert "device busy, part of compute" in text
    assert "feed ratio 1.00, the feed costs 0 to 0 % of the time" in text
    assert not re.search(r"1\.0[1-9]|10[1-9]| -\d|change|gain|echo", text)
    assert result.as_json("title", noisy, verdict)["feed_ratio"] == pytest.approx(0.01 / 0.0097)
