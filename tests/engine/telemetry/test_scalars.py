"""Every scalar of a run is explained in docs/measuring.md, and no other."""

import re

import psutil
import pytest
import torch
from harness import ROOT, train

from fastgpu.process.world import World
from fastgpu.report.results import read_run
from fastgpu.telemetry.clock import Throughput
from fastgpu.telemetry.monitor import gpu_counters


@pytest.mark.skipif(not psutil.LINUX, reason="other systems lack some counters")
def test_the_page_explains_exactly_what_a_run_and_a_machine_with_a_gpu_log(folder, nvml):
    train("train.epochs=1")
    points = read_run(folder / "runs/a").points
    logged = {name for point in points for name in point} - {"step", "time_s", "part", *Throughput._fields}
    logged |= {"val/loss"}  # of other workloads
    logged |= {"gpu0/util_min_pct", *gpu_counters(World(0, 1, 1, torch.device("cuda", 0)))}
    assert [name for name in logged if not re.fullmatch(r"(train|data|val|gpu\d+|host)/[a-z0-9_]+", name)] == []
    page = (ROOT / "docs/measuring.md").read_text(encoding="utf-8")
    explained = re.findall(r"(?m)^\| `([^`|]+/[^`|]+)` \| [^|]* \| [^|]+ \| [^|]*\|$", page)
    patterns = {name: name.replace("<n>", r"\d+").replace("<metric>", r"\w+") for name in explained}
    assert [name for name in logged if not any(re.fullmatch(pattern, name) for pattern in patterns.values())] == []
    assert [name for name in explained if not any(re.fullmatch(patterns[name], each) for each in logged)] == []
