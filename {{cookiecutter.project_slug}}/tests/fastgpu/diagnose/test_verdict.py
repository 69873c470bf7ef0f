import re

import pytest
from harness import ROOT

import workloads
from fastgpu.diagnose.verdict import Facts, Measured, Rounds, Setting, Verdict, judge, settings_to_try
from fastgpu.process.config_loader import keys

HOST = Facts(nearer_tier="host")
FP16 = Facts(is_fp16=True)
FLOATS = Facts(float_fields={"images": 4})


def quiet(step_s: float) -> Rounds:
    """Rounds that differ by 1 %."""
    return Rounds((step_s, 0.99 * step_s, 1.01 * step_s))


def measured(compute_s: float, loop_s: float, **others: object) -> Measured:
    """Measurements on a quiet machine. others: fields of `Measured`; seconds of a part become its timing."""
    fields = {"ranks_compute_s": (compute_s,)} | others
    for name in ("copy", "supply", "cached"):
        if name in others:
            fields[name] = quiet(others[name])
    return Measured(64, quiet(compute_s), quiet(loop_s), **fields)


@pytest.mark.parametrize(
    ("m", "facts", "cause", "advice"),
    [
        (measured(1.0, 1.01, supply=0.2, cached=0.2), HOST, "COMPUTE", ("nothing", 1.0)),
        (measured(1.0, 4.0, supply=4.0, cached=0.5), HOST, "READ", ("data.tier=host", 4.0)),
        (measured(1.0, 4.0, supply=4.0, cached=3.9), HOST, "DECODE", ("data.tier=host", 4.0)),
        (measured(1.0, 3.0, supply=3.0, cached=0.5), Facts(), "READ", ("data.echo=3", 3.0)),
        (measured(1.0, 9.0, supply=9.0, cached=0.5), Facts(max_echo=2.0), "READ", ("data.echo=2", 2.0)),
        (measured(1.0, 3.0, copy=3.0, supply=3.0), Facts(nearer_tier="device"), "COPY", ("data.tier=device", 3.0)),
        (measured(1.0, 3.0, copy=3.0, supply=2.9), FLOATS, "COPY", ("store images as uint8", 3.0)),
        (measured(1.0, 1.0, busy_s=0.1), HOST, "LAUNCH", ("data.batch_size=512", 8.0)),
        (measured(1.0, 1.0, busy_s=0.6, syncs=("mine.py:3",)), HOST, "SYNC", ("mine.py:3", 1 / 0.6)),
        (measured(1.0, 1.0, busy_s=0.6, syncs=("mine.py:3",)), FP16, "SYNC", ("train.precision=bf16", 1 / 0.6)),
        (measured(1.0, 1.0, busy_s=0.95, syncs=("mine.py:3",)), HOST, "COMPUTE", ("nothing", 1.0)),
        (measured(1.0, 1.0, transform_s=0.4), HOST, "AUGMENT", ("transform", 1 / 0.6)),
        (measured(1.0, 1.0, ranks_compute_s=(0.5, 1.0)), HOST, "STRAGGLER", ("rank 1", 2.0)),
        (measured(1.0, 4.0, supply=4.0, cached=4.0, ranks_supply_s=(4.0, 2.0)), HOST, "STRAGGLER", ("rank 0", 2.0)),
        (measured(1.0, 1.0, ranks_compute_s=(0.6, 0.6)), HOST, "COMM", ("data.batch_size=128", 1.25)),
        (measured(1.0, 1.8, supply=0.9, cached=0.9, cpu_share=0.95), Facts(), "DECODE", ("data.echo=2", 1.8 / 1.4)),
        (measured(1.0, 1.8, supply=0.05, cached=0.05, cpu_share=0.95), HOST, "INCONCLUSIVE", ("quiet machine", 1.0)),
        (measured(1.0, 1.8, supply=0.9, cached=0.9, cpu_share=0.5), HOST, "INCONCLUSIVE", ("quiet machine", 1.0)),
        (measured(1.0, 1.8, supply=0.9, cached=0.9, busy_s=0.1), HOST, "LAUNCH", ("data.batch_size=512", None)),
    ],
)
def test_one_cause_and_one_change(m, facts, cause, advice):
    """advice: a part of the change, and the predicted gain (None: any)."""
    change, gain = advice
    verdict = judge(m, facts)
    assert verdict.cause == cause
    assert change in verdict.change
    if gain:
        assert verdict.gain == pytest.approx(gain, rel=0.02)


def test_the_change_as_settings():
    verdict = judge(measured(1.0, 4.0, supply=4.0, cached=0.5), HOST)
    assert (verdict.change, verdict.overrides) == ("data.tier=host", {"data.tier": "host"})
    advice = judge(measured(1.0, 3.0, copy=3.0, supply=2.9), FLOATS)
    assert (advice.overrides, judge(measured(1.0, 1.0), HOST).overrides) == ({}, {})


def test_the_best_setting_that_was_tried_is_the_change():
    slow_supply = measured(1.0, 4.0, supply=4.0, cached=0.5)
    four_readers = Setting("loader.num_readers", 4)
    assert settings_to_try("READ", Facts(n_readers=2)) == [four_readers]
    verdict = judge(slow_supply, Facts(n_readers=2), {four_readers: 2.0})
    assert (verdict.change, verdict.gain) == ("loader.num_readers=4", 2.0)
    assert judge(slow_supply, Facts(n_readers=2), {four_readers: 3.95}).change == "data.echo=4"

    slow_copies = measured(1.0, 3.0, copy=3.0, supply=3.0)
    pinned = Setting("loader.pin_memory", True)
    assert settings_to_try("COPY", Facts(pin_memory=False)) == [pinned]
    assert settings_to_try("COPY", Facts(pin_memory=True)) == []
    verdict = judge(slow_copies, Facts(pin_memory=False), {pinned: 1.5})
    assert (verdict.change, verdict.gain) == ("loader.pin_memory=true", pytest.approx(2.0))

    slow_transform = measured(1.0, 1.0, transform_s=0.5)
    lighter = Facts(lighter=(Setting("model.color_jitter", 0.0), Setting("model.flip", False)))
    no_jitter, no_flip = settings_to_try("AUGMENT", lighter)
    verdict = judge(slow_transform, lighter, {no_jitter: 0.6, no_flip: 0.95})
    assert (verdict.change, verdict.gain) == ("model.color_jitter=0", pytest.approx(1 / 0.6))
    assert settings_to_try("COMPUTE", Facts()) == []


def test_a_noisy_machine_gives_no_verdict_where_noise_could_decide_it():
    noisy = Rounds((0.8, 1.0, 1.4, 1.0, 1.2))
    m = Measured(64, Rounds((1.0,) * 5), noisy, supply=quiet(1.1), cached=quiet(0.2))
    verdict = judge(m, HOST)
    assert (verdict.cause, verdict.gain, verdict.confidence) == ("INCONCLUSIVE", 1.0, "low")
    ten_times_as_fast = judge(m._replace(supply=quiet(0.1)), HOST)
    assert (ten_times_as_fast.cause, ten_times_as_fast.confidence) == ("COMPUTE", "medium")


def test_feed_ratio_pairs_the_rounds():
    m = Measured(64, Rounds((1.0, 2.0, 4.0)), Rounds((2.0, 4.0, 8.0)))
    assert m.feed_ratio == Rounds((0.5, 0.5, 0.5))
    assert m.feed_ratio.median == 0.5
    assert m.feed_ratio.spread == 0


def test_what_else_would_help():
    slow_decoding = measured(1.0, 4.0, supply=4.0, cached=4.0)
    command = "python convert.py repack x"
    assert judge(slow_decoding, Facts(repack_command=command)).see_also.endswith(command)
    assert "gzip" in judge(slow_decoding, Facts(filters="gzip")).see_also
    fed = judge(measured(1.0, 1.0), Facts(faster=(Setting("train.compile", True),)))
    assert fed == Verdict("COMPUTE", fed.why, "nothing", 1.0, "high", see_also="train.compile=true")


def test_messages_name_keys_of_the_config():
    sections = "|".join({key.partition(".")[0] for key in keys() if "." in key})
    for path in [ROOT / "diagnose.py", *(ROOT / "fastgpu" / "diagnose").glob("*.py")]:
        quoted = re.findall(rf"(?<![\w/.])(?:{sections})\.[a-z_0-9]+", "".join(re.findall(r'".*?"', path.read_text())))
        assert set(quoted) - {"train.py", "train.h5"} <= keys().keys(), path


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "workloads").glob("[a-z]*.py")))
def test_lighter_values_are_valid_options_of_the_workload(name):
    workload = workloads.load(name)
    workload.Options.model_validate(dict(workload.lighter))
