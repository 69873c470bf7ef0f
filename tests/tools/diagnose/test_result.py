import json
import re

import pytest

from fastgpu.diagnose import result
from fastgpu.diagnose.result import Finding
from fastgpu.diagnose.verdict import Facts, Measured, Rounds, Verdict, judge

CONFIG = {"workload": "mine", "data.batch_size": 64, "loader.num_readers": 2, "model.shape": (3, 4)}
MACHINE = {"device": "CPU process", "world_size": 1, "local_world_size": 1, "row_bytes": 72}
SUBJECT = {"world": "1 CPU process", "machine": MACHINE, "config": CONFIG}
SLOW = Measured(64, Rounds((0.01,) * 3), Rounds((0.04,) * 3), supply=Rounds((0.04,) * 3), cached=Rounds((0.001,) * 3))
VERDICT = judge(SLOW, Facts())


def test_the_table_has_every_part_and_one_verdict():
    lines = result.table("title", SLOW, VERDICT).splitlines()
    assert len(lines) <= 15
    assert lines[0] == "title"
    parts = [line.split("  ")[1] for line in lines[2:6]]
    assert parts == ["compute", "supply from the page cache", "supply", "the training loop"]
    assert lines[2].split()[1:] == ["10.000", "10.000", "-", "10.000", "6,400", "1.00", "x"]
    assert "feed ratio 0.25, noise +-0 %" in lines
    assert any(line.startswith("READ: the loop waits for bytes from storage (98 to 98 %") for line in lines)
    assert "  change    data.echo=4" in lines
    assert "  certainty high" in lines
    assert "  gain      4.00 x the speed, predicted: 6,400 rows/s" in lines


def test_the_table_of_a_fed_gpu_shows_its_work_and_no_change():
    fed = Measured(64, Rounds((0.01,) * 3), Rounds((0.01,) * 3), busy_s=0.009)
    text = result.table("title", fed, judge(fed, Facts()))
    assert "device busy, part of compute" in text
    assert "change" not in text


def test_a_loop_that_seems_faster_than_compute_alone_is_as_fast():
    """The raw numbers are in the JSON values."""
    loop = Rounds((0.0094, 0.0097, 0.01, 0.0097))
    noisy = Measured(64, Rounds((0.01,) * 4), loop, copy=loop, supply=Rounds((1e-4, 1e-4, 2e-2, 1e-4)))
    verdict = judge(noisy, Facts())
    text = result.table("title", noisy, verdict)
    assert "feed ratio 1.00, noise +-3 %" in text
    assert text.count(" 1.00 x") == 3
    assert not re.search(r"1\.0[1-9]|10[1-9]| -\d", text)
    assert "0.100 - 20.000" in text  # not +-9950 %
    numbers = result.as_json(SUBJECT, noisy, verdict, [])
    assert numbers["feed_ratio"] == pytest.approx(0.01 / 0.0097)
    assert numbers["feed_ratio_shown"] == "1.00, noise +-3 %"
    assert numbers["feed_ratio_rounds"] == noisy.feed_ratio.values


def test_numbers_survive_json():
    findings = [Finding("versions", "python 3")]
    numbers = json.loads(json.dumps(result.as_json(SUBJECT, SLOW, VERDICT, findings)))
    assert numbers["feed_ratio"] == 0.25
    assert numbers["compute_rows_per_s"] == 6400
    assert numbers["ceilings"]["supply"]["rows_per_s"] == 1600
    verdict = Verdict(**numbers["verdict"])
    assert verdict._replace(candidates=tuple(verdict.candidates)) == VERDICT
    assert Finding(**numbers["preflight"][0]) == findings[0]
