import json

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fastgpu.diagnose import result as diagnosis
from fastgpu.diagnose.verdict import Facts, Measured, Timing, Verdict, judge
from fastgpu.telemetry.log import Log
from fastgpu.telemetry.report import read_metrics, verdicts, write_report

FLAT = {
    "workload": "images",
    "data.batch_size": 64,
    "loader.num_readers": 2,
    "model.width": 32,
    "optim.lr": 0.1,
    "train.precision": "fp32",
    "train.epochs": 3,
}
SLOW = Measured(64, Timing((0.01,) * 3), Timing((0.04,) * 3), supply=Timing((0.04,) * 3), cached=Timing((0.001,) * 3))


@pytest.fixture
def run(tmp_path):
    """A run's folder beside a diagnosis of just such a run."""
    numbers = diagnosis.as_json("1 CPU process", FLAT, SLOW, judge(SLOW, Facts()), [])
    (tmp_path / diagnosis.FILE).write_text(json.dumps(numbers))
    (tmp_path / "a").mkdir()
    tree = {
        "workload": "images",
        "data": {"batch_rows": 64, "readers": 2},
        "model": {"width": 32},
        "train": {"precision": "fp32", "epochs": 3},
    }
    (tmp_path / "a" / "config.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path / "a"


def test_the_table_has_every_ceiling_and_one_verdict():
    lines = diagnosis.table("head", SLOW, judge(SLOW, Facts())).splitlines()
    assert len(lines) <= 15
    assert lines[0] == "head"
    assert [line.split("  ")[1] for line in lines[2:6]] == [
        "compute",
        "supply from the page cache",
        "supply",
        "the training loop",
    ]
    assert lines[2].split()[-5:] == ["10.000", "6,400", "1.00", "x", "+-0"] or "6,400" in lines[2]
    assert "feed ratio 0.250 [0.250 to 0.250]" in lines
    assert any(line.startswith("READ: the loop waits for bytes from storage (98 %") for line in lines)
    assert "  change   data.echo=4" in lines
    assert "  gives    4.00 x the speed, predicted; certainty: high" in lines


def test_json_round_trip():
    verdict = judge(SLOW, Facts())
    found = json.loads(json.dumps(diagnosis.as_json("w", FLAT, SLOW, verdict, [])))
    assert found["feed_ratio"] == 0.25
    assert found["compute_rows_per_s"] == 6400
    assert found["ceilings"]["supply"]["rows_per_s"] == 1600
    assert Verdict(**found["verdict"]) == verdict


def test_a_later_run_knows_its_ceiling(run):
    assert diagnosis.ceiling(run.parent, "1 CPU process", FLAT | {"loader.num_readers": 9, "optim.lr": 1}) == 6400
    assert diagnosis.ceiling(run.parent, "8 x GPU", FLAT) is None
    assert diagnosis.ceiling(run.parent, "1 CPU process", FLAT | {"model.width": 64}) is None
    assert diagnosis.ceiling(run, "1 CPU process", FLAT) is None  # there is no such file
    noisy = json.loads((run.parent / diagnosis.FILE).read_text())
    noisy["verdict"]["cause"] = "INCONCLUSIVE"
    (run.parent / diagnosis.FILE).write_text(json.dumps(noisy))
    assert diagnosis.ceiling(run.parent, "1 CPU process", FLAT) is None
    assert diagnosis.of_run(run) == ""
    (run.parent / diagnosis.FILE).write_text("{")
    assert diagnosis.ceiling(run.parent, "1 CPU process", FLAT) is None
    assert diagnosis.of_run(run) == ""


def test_a_run_logs_its_feed_ratio_and_shows_the_verdict(run):
    log = Log(run, 100, 0, FLAT, "1 CPU process")
    for step in range(3):
        log.scalars(step, {"train/trained_rows_per_s": 1600.0, "data/wait_pct": 75.0})
    text = log.finish(FLAT, {})
    assert [point["data/feed_ratio"] for point in read_metrics(run)] == [0.25] * 3
    assert "feed ratio" in text
    events = EventAccumulator(str(run))
    events.Reload()
    shown = events.Tensors("verdict/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "run `python diagnose.py`" in shown
    assert "READ: the loop waits" in shown
    said = verdicts(run, read_metrics(run))
    assert said[0] == "input-bound: 75 % of the time waits for data; run `python diagnose.py`"
    assert "READ: the loop waits for bytes from storage" in said[1]
    assert "READ: the loop waits" in (run / "report.html").read_text()


def test_a_verdict_on_another_data_path_is_not_shown(run):
    tree = yaml.safe_load((run / "config.yaml").read_text())
    tree["data"]["readers"] = 4
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    assert diagnosis.of_run(run) == ""
    (run / "metrics.jsonl").write_text('{"step": 1, "time_s": 1, "data/wait_pct": 0.2, "gpu0/util_pct": 40}\n')
    assert verdicts(run, read_metrics(run)) == [
        "fed, but the GPU is idle 60 % of the time (LAUNCH, SYNC or COMM): `python diagnose.py`"
    ]
    write_report(run)
    assert "the GPU is idle" in (run / "report.html").read_text()
