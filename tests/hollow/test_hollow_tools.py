"""The other programs on stand-ins for GPUs: diagnose.py, predict.py and bench/gpu.py, and the counters of NVML."""

import re
import sys
from pathlib import Path

import pytest

from support import PROJECT, ROOT
from support.hollow import hollow, read_reports, train_on_gpus
from support.ranks import printed_by

pytestmark = [pytest.mark.hollow, pytest.mark.slow]

WORDS = ("model.width=4", "train.epochs=1", "data.tier=disk")


def assert_clean(prefix: Path, *contexts: list[int]) -> None:
    """The processes have used these GPUs, without a race."""
    reports = read_reports(prefix)
    assert [report.contexts for report in reports] == [*contexts]
    notes = [note for report in reports for note in report.notes]
    assert not notes, "\n".join(notes)


@pytest.mark.parametrize("ranks", [1, 2])
def test_hollow_diagnosis(tmp_path, ranks):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if ranks > 1 else []
    command = [sys.executable, *launcher, "diagnose.py", "--seconds", "0.3", *WORDS]
    shown = printed_by(command, PROJECT, **hollow(tmp_path / "report", devices=ranks, copy_us=1000))
    assert re.search(r"(?m)^verdict: |^[A-Z]+: ", shown), shown
    assert_clean(tmp_path / "report", *([rank] for rank in range(ranks)))


def test_hollow_predictions_are_those_of_a_cpu(tmp_path):
    train_on_gpus(tmp_path, *WORDS, f"run.folder={tmp_path}", "run.name=a", "train.precision=fp32")
    command = [sys.executable, "predict.py", tmp_path / "a", "data/digits.h5::/val", "-o"]
    for device in ("cuda", "cpu"):
        environment = hollow(tmp_path / f"report-{device}")
        printed_by([*command, tmp_path / f"{device}.csv", "--device", device], PROJECT, **environment)
    assert (tmp_path / "cuda.csv").read_text() == (tmp_path / "cpu.csv").read_text()
    assert_clean(tmp_path / "report-cuda", [0])


def test_hollow_benchmark(tmp_path):
    command = [sys.executable, "bench/gpu.py", "--quick", "--rounds", "1", "--seconds", "0.2", "--out", tmp_path]
    printed_by(command, ROOT, **hollow(tmp_path / "report"))
    (page,) = tmp_path.glob("gpu_*.md")
    assert page.read_text().count("feed ratio, ") == 3
    assert_clean(tmp_path / "report", [0])


COUNTERS = """
import torch
from fastgpu.process.world import World
from fastgpu.telemetry.monitor import gpu_counters

counters = gpu_counters(World(0, 1, 1, torch.device("cuda", 0)))
print({name: counters[f"gpu0/{name}"]() for name in ("util_pct", "power_w", "temperature_c")})
"""


def test_hollow_counters_are_those_of_the_visible_gpu(tmp_path):
    """CUDA_VISIBLE_DEVICES renumbers GPUs for CUDA, but not for NVML."""
    variables = hollow(tmp_path / "report", devices=2) | {"CUDA_VISIBLE_DEVICES": "1"}
    shown = printed_by([sys.executable, "-c", COUNTERS], PROJECT, **variables)
    assert shown == "{'util_pct': 41, 'power_w': 101.0, 'temperature_c': 51.0}\n"
