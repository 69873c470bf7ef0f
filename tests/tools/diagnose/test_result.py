import json
import re

import pytest

from fastgpu.diagnose import result
from fastgpu.diagnose.verdict import Measured, Rounds, judge

SLOW = Measured(64, Rounds((0.01,) * 3), Rounds((0.04,) * 3), supply=Rounds((0.04,) * 3), cached=Rounds((0.001,) * 3))
VERDICT = judge(SLOW, readers=("loader.num_readers=4", 0.005))
TABLE = """\
title
  each part alone              ms per step   from - to                  rows/s  of compute
  compute                           10.000   10.000 - 10.000             6,400      1.00 x
  supply from the page cache         1.000   1.000 - 1.000              64,000     10.00 x
  supply                            40.000   40.000 - 40.000             1,600      0.25 x
  the training loop                 40.000   40.000 - 40.000             1,600      0.25 x
  transform, part of compute         0.000
feed ratio 0.25, the feed costs 75 to 75 % of the time
READ: 98 to 98 % of the time of the supply is spent in storage
  change    loader.num_readers=4
  gain      4.00 x the speed, predicted: 6,400 rows/s
  echo      data.echo=4 trains on each row that often in the same time
"""


def test_the_table_and_the_json_have_every_part_and_one_verdict():
    assert result.table("title", SLOW, VERDICT).startswith(TABLE + "  see also  ")
    numbers = json.loads(json.dumps(result.as_json("title", SLOW, VERDICT)))
    assert numbers["feed_ratio"] == 0.25
    assert (numbers["batch_size"], numbers["supply"], numbers["ranks_supply"]) == (64, [0.04] * 3, [])
    assert numbers["verdict"] == VERDICT._asdict()


def test_a_loop_that_seems_faster_than_compute_alone_is_as_fast_and_needs_no_change():
    """The raw numbers are in the JSON values."""
    loop = Rounds((0.0094, 0.0097, 0.01, 0.0097))
    noisy = Measured(64, Rounds((0.01,) * 4), loop, supply=Rounds((1e-4, 1e-4, 2e-2, 1e-4)), busy_s=0.009)
    verdict = judge(noisy)
    text = result.table("title", noisy, verdict)
    assert "device busy, part of compute" in text
    assert "feed ratio 1.00, the feed costs 0 to 0 % of the time" in text
    assert text.count(" 1.00 x") == 2
    assert not re.search(r"1\.0[1-9]|10[1-9]| -\d|change|gain|echo", text)
    assert result.as_json("title", noisy, verdict)["feed_ratio"] == pytest.approx(0.01 / 0.0097)
