import json
import re
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from harness import ALONE, CPU

from fastgpu.diagnose import result
from fastgpu.diagnose.verdict import Measured, Options, Rounds, judge
from fastgpu.process.config import Data
from fastgpu.process.world import World

SLOW = Measured(64, Rounds((0.01,) * 3), Rounds((0.04,) * 3), supply=Rounds((0.04,) * 3), cached=Rounds((0.001,) * 3))
VERDICT = judge(SLOW, Options(readers=("loader.num_readers=4", 0.005)))


# ---------------------------------------------------------------------------------------------- before measuring


def look(path: str, world: World = ALONE) -> str:
    data = Data(train=path, val=path, fields={"images": "images", "labels": "labels"})
    return "\n".join(result.look(data, world))


def test_processes_and_their_cpus(tmp_path, monkeypatch):
    assert "!" not in look(str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="a"))
    monkeypatch.setattr(result, "open_nvml", driver)
    monkeypatch.setattr(result, "available_cpus", lambda: 1)
    gpu = torch.device("cuda", 0)
    assert "! processes    1 here, 1 CPUs each, 8 GPUs visible: 7 GPUs have nothing" in look("x", World(0, 1, 1, gpu))
    assert "the GPUs are not used (dist.device)" in look("x")
    assert "the readers and the loop share a CPU" in look("x", World(1, 8, 8, gpu))


def test_a_network_file_system_is_told(tmp_path, monkeypatch):
    mounts = [SimpleNamespace(mountpoint="/", fstype="ext4"), SimpleNamespace(mountpoint=str(tmp_path), fstype="nfs4")]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)
    assert f"! data         {tmp_path}/rows.h5::/train on nfs4: the first" in look(f"{tmp_path}/rows.h5::/train")
    assert f"  data         {Path('/rows.h5')} on ext4" in look("/rows.h5")


def driver(width: int = 16, reasons: int = 0) -> SimpleNamespace:
    names = {f"nvmlClocksEventReason{name}": 1 << number for number, name in enumerate(result.LIMITS)}
    return SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetCurrPcieLinkWidth=lambda _: width,
        nvmlDeviceGetMaxPcieLinkWidth=lambda _: 16,
        nvmlDeviceGetName=lambda _: "NVIDIA X",
        nvmlDeviceGetCurrentClocksEventReasons=lambda _: reasons,
        **names,
    )


class WithGpus(World):
    """A world whose GPUs have these UUIDs."""

    gpus = ("a",)


@pytest.mark.parametrize(
    ("nvml", "line"),
    [
        (driver(), "  GPU          NVIDIA X, PCIe x16"),
        (driver(width=4), "! GPU          NVIDIA X, PCIe x4: its slot has 4 of 16 PCIe lanes"),
        (driver(reasons=0b1000), "HwThermalSlowdown"),
        (SimpleNamespace(), "! GPUs         not seen: "),
    ],
)
def test_gpus_through_a_stub_of_the_driver(monkeypatch, nvml, line):
    monkeypatch.setattr(result, "open_nvml", lambda: nvml)
    assert line in look("x", WithGpus(0, 1, 1, CPU))


# ---------------------------------------------------------------------------------------------- afterwards


def test_the_table_has_every_part_and_one_verdict():
    lines = result.table("title", SLOW, VERDICT).splitlines()
    assert lines[0] == "title"
    parts = [line.split("  ")[1] for line in lines[2:6]]
    assert parts == ["compute", "supply from the page cache", "supply", "the training loop"]
    assert lines[2].split()[1:] == ["10.000", "10.000", "-", "10.000", "6,400", "1.00", "x"]
    assert "feed ratio 0.25, noise +-0 %" in lines
    assert any(line.startswith("READ: the loop waits for bytes from storage (98 to 98 %") for line in lines)
    assert "  change    loader.num_readers=4" in lines
    assert "  gain      4.00 x the speed, predicted: 6,400 rows/s" in lines
    assert any(line.startswith("  echo      data.echo=4 ") for line in lines)


def test_the_table_of_a_fed_gpu_shows_its_work_and_no_change():
    fed = Measured(64, Rounds((0.01,) * 3), Rounds((0.01,) * 3), busy_s=0.009)
    text = result.table("title", fed, judge(fed, Options()))
    assert "device busy, part of compute" in text
    assert not re.search("change|gain|echo", text)


def test_a_loop_that_seems_faster_than_compute_alone_is_as_fast():
    """The raw numbers are in the JSON values."""
    loop = Rounds((0.0094, 0.0097, 0.01, 0.0097))
    noisy = Measured(64, Rounds((0.01,) * 4), loop, supply=Rounds((1e-4, 1e-4, 2e-2, 1e-4)))
    verdict = judge(noisy, Options())
    text = result.table("title", noisy, verdict)
    assert "feed ratio 1.00, noise +-3 %" in text
    assert text.count(" 1.00 x") == 2
    assert not re.search(r"1\.0[1-9]|10[1-9]| -\d", text)
    assert result.as_json("title", noisy, verdict, [])["feed_ratio"] == pytest.approx(0.01 / 0.0097)


def test_numbers_survive_json():
    numbers = json.loads(json.dumps(result.as_json("title", SLOW, VERDICT, ["! a"])))
    assert numbers["feed_ratio"] == 0.25
    assert numbers["parts"]["supply"] == {"rows_per_s": 1600, "step_s": [0.04] * 3}
    assert numbers["verdict"] == VERDICT._asdict()
    assert numbers["preflight"] == ["! a"]
