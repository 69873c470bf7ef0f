import json
import re

import pytest

from fastgpu.diagnose import result
from fastgpu.diagnose.verdict import Measured, Rounds, judge

SLOW = Measured(64, Rounds((0.01,) * 3), Rounds((0.04,) * 3), supply=Rounds((0.04,) * 3), cached=Rounds((0.001,) * 3))
VERDICT = judge(SLOW, readers=("loader.num_readers=4", 0.005))


def test_the_table_has_every_part_and_one_verdict():
    lines = result.table("title", SLOW, VERDICT).splitlines()
    assert lines[0] == "title"
    parts = [line.split("  ")[1] for line in lines[2:6]]
    assert parts == ["compute", "supply from the page cache", "supply", "the training loop"]
    assert lines[2].split()[1:] == ["10.000", "10.000", "-", "10.000", "6,400", "1.00", "x"]
    assert "feed ratio 0.25, the feed costs 75 to 75 % of the time" in lines
    assert "READ: 98 to 98 % of the time of the supply is spent in storage" in lines
    assert "  change    loader.num_readers=4" in lines
    assert "  gain      4.00 x the speed, predicted: 6,400 rows/s" in lines
    assert any(line.startswith("  echo      data.echo=4 ") for line in lines)


def test_the_table_of_a_fed_gpu_shows_its_work_and_no_change():
    fed = Measured(64, Rounds((0.01,) * 3), Rounds((0.01,) * 3), busy_s=0.009)
    text = result.table("title", fed, judge(fed))
    assert "device busy, part of compute" in text
    assert not re.search("change|gain|echo", text)


def test_a_loop_that_seems_faster_than_compute_alone_is_as_fast():
    """The raw numbers are in the JSON values."""
    loop = Rounds((0.0094, 0.0097, 0.01, 0.0097))
    noisy = Measured(64, Rounds((0.01,) * 4), loop, supply=Rounds((1e-4, 1e-4, 2e-2, 1e-4)))
    verdict = judge(noisy)
    text = result.table("title", noisy, verdict)
    assert "feed ratio 1.00, the feed costs 0 to 0 % of the time" in text
    assert text.count(" 1.00 x") == 2
    assert not re.search(r"1\.0[1-9]|10[1-9]| -\d", text)
    assert result.as_json("title", noisy, verdict)["feed_ratio"] == pytest.approx(0.01 / 0.0097)


def test_numbers_survive_json():
    numbers = json.loads(json.dumps(result.as_json("title", SLOW, VERDICT)))
    assert numbers["feed_ratio"] == 0.25
    assert (numbers["batch_size"], numbers["supply"], numbers["ranks_supply"]) == (64, [0.04] * 3, [])
    assert numbers["verdict"] == VERDICT._asdict()
