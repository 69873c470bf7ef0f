import pytest

from fastgpu.diagnose.verdict import Facts, Measured, Timing, Verdict, judge, worth_trying

EVEN = Facts(near_tier="host")


FP16, FLOATS = Facts(fp16=True), Facts(float_fields={"images": 4})


def t(step_s: float) -> Timing:
    return Timing((step_s, 0.99 * step_s, 1.01 * step_s))


def measured(compute: float, loop: float, **others: object) -> Measured:
    parts = {
        key: t(value) if isinstance(value, float) and key in ("copy", "supply", "cached") else value
        for key, value in others.items()
    }
    rounds = {"compute": t(compute), "loop": t(loop)}
    return Measured(64, **rounds, **({"ranks_compute_s": (compute,)} | parts))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("m", "facts", "cause", "change", "gain"),
    [
        (measured(1.0, 1.01, supply=0.2, cached=0.2), EVEN, "COMPUTE", "nothing", 1.0),
        (measured(1.0, 4.0, supply=4.0, cached=0.5), EVEN, "READ", "data.tier=host", 4.0),
        (measured(1.0, 4.0, supply=4.0, cached=3.9), EVEN, "DECODE", "data.tier=host", 4.0),
        (measured(1.0, 3.0, supply=3.0, cached=0.5), Facts(), "READ", "data.echo=3", 3.0),
        (measured(1.0, 9.0, supply=9.0, cached=0.5), Facts(most_echo=2.0), "READ", "data.echo=2", 2.0),
        (measured(1.0, 3.0, copy=3.0, supply=3.0), Facts(near_tier="device"), "COPY", "data.tier=device", 3.0),
        (measured(1.0, 3.0, copy=3.0, supply=2.9), FLOATS, "COPY", "store images as uint8", 3.0),
        (measured(1.0, 1.0, busy_s=0.1), EVEN, "LAUNCH", "data.batch_size=512", 8.0),
        (measured(1.0, 1.0, busy_s=0.6, syncs=("mine.py:3",)), EVEN, "SYNC", "mine.py:3", 1 / 0.6),
        (measured(1.0, 1.0, busy_s=0.6, syncs=("mine.py:3",)), FP16, "SYNC", "train.precision=bf16", 1 / 0.6),
        (measured(1.0, 1.0, busy_s=0.95, syncs=("mine.py:3",)), EVEN, "COMPUTE", "nothing", 1.0),
        (measured(1.0, 1.0, transform_s=0.4), EVEN, "AUGMENT", "transform", 1 / 0.6),
        (measured(1.0, 1.0, ranks_compute_s=(0.5, 1.0)), EVEN, "STRAGGLER", "rank 1", 2.0),
        (measured(1.0, 4.0, supply=4.0, cached=4.0, ranks_supply_s=(4.0, 2.0)), EVEN, "STRAGGLER", "rank 0", 2.0),
        (measured(1.0, 1.0, ranks_compute_s=(0.6, 0.6)), EVEN, "COMM", "data.batch_size=128", 1.25),
        (measured(1.0, 1.8, supply=0.9, cached=0.9, cpu_share=0.95), Facts(), "DECODE", "data.echo=2", 1.8 / 1.4),
        (measured(1.0, 1.8, supply=0.05, cached=0.05, cpu_share=0.95), EVEN, "INCONCLUSIVE", "quiet machine", 1.0),
        (measured(1.0, 1.8, supply=0.9, cached=0.9, cpu_share=0.5), EVEN, "INCONCLUSIVE", "quiet machine", 1.0),
        (measured(1.0, 1.8, supply=0.9, cached=0.9, busy_s=0.1), EVEN, "LAUNCH", "data.batch_size=512", None),
    ],
)
def test_one_cause_and_one_change(m, facts, cause, change, gain):
    verdict = judge(m, facts)
    assert verdict.cause == cause
    assert change in verdict.change
    if gain:
        assert verdict.gain == pytest.approx(gain, rel=0.02)


def test_the_best_of_what_was_tried_is_the_change():
    m = measured(1.0, 4.0, supply=4.0, cached=0.5)
    assert worth_trying("READ", Facts(readers=2)) == ["loader.num_readers=4"]
    verdict = judge(m, Facts(readers=2), {"loader.num_readers=4": 2.0})
    assert (verdict.change, verdict.gain) == ("loader.num_readers=4", 2.0)
    assert judge(m, Facts(readers=2), {"loader.num_readers=4": 3.95}).change == "data.echo=4"
    m = measured(1.0, 3.0, copy=3.0, supply=3.0)
    assert worth_trying("COPY", Facts(pins=False)) == ["loader.pin_memory=true"]
    assert judge(m, Facts(pins=False), {"loader.pin_memory=true": 1.5}).gain == pytest.approx(2.0)
    m = measured(1.0, 1.0, transform_s=0.5)
    lighter = Facts(lighter=("model.color_jitter=0", "model.flip=false"))
    verdict = judge(m, lighter, dict(zip(worth_trying("AUGMENT", lighter), (0.6, 0.95), strict=True)))
    assert (verdict.change, verdict.gain) == ("model.color_jitter=0", pytest.approx(1 / 0.6))
    assert worth_trying("COMPUTE", Facts()) == []


def test_a_noisy_machine_gives_no_verdict_where_noise_could_decide_it():
    noisy = Timing((0.8, 1.0, 1.4, 1.0, 1.2))
    m = Measured(64, Timing((1.0,) * 5), noisy, supply=t(1.1), cached=t(0.2))
    verdict = judge(m, EVEN)
    assert (verdict.cause, verdict.gain, verdict.sure) == ("INCONCLUSIVE", 1.0, "low")
    far = judge(m._replace(supply=t(0.1)), EVEN)  # however noisy: the supply is ten times as fast
    assert (far.cause, far.sure) == ("COMPUTE", "medium")


def test_feed_ratio_pairs_the_rounds():
    m = Measured(64, Timing((1.0, 2.0, 4.0)), Timing((2.0, 4.0, 8.0)))
    assert m.feed_ratio.rounds == (0.5, 0.5, 0.5)
    assert m.feed_ratio.spread == 0


def test_what_helps_beside():
    m = measured(1.0, 4.0, supply=4.0, cached=4.0)
    assert judge(m, Facts(dataset="python convert.py repack x")).also.endswith("python convert.py repack x")
    assert "gzip" in judge(m, Facts(filters="gzip")).also
    fed = judge(measured(1.0, 1.0), Facts(unused=("train.compile=true",)))
    assert fed == Verdict("COMPUTE", fed.why, "nothing", 1.0, "high", "train.compile=true")
