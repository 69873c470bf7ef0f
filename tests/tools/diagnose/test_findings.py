from pathlib import Path
from types import SimpleNamespace

import psutil
import torch

from fastgpu.diagnose import result
from fastgpu.process.config import Data
from fastgpu.process.world import World

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
ALONE = World(0, 1, 1, CPU)


class WithGpus(World):
    """A world whose GPUs have these UUIDs."""

    gpus = ("a",)


def look(path: str, world: World = ALONE, *, nvml: object = None) -> dict[str, result.Finding]:
    """{topic: finding}"""
    data = Data(train=path, val=path, fields={"images": "images", "labels": "labels"})
    return {finding.topic: finding for finding in result.look(data, world, nvml=nvml)}


def test_processes_and_their_cpus(write, monkeypatch):
    path = write()
    assert look(path)["processes"].advice == ""
    assert str(look(path)["processes"]).startswith("  processes ")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(result, "available_cpus", lambda: 1)
    one_gpu = World(0, 1, 1, GPU)
    finding = look(path, one_gpu)["processes"]
    assert finding.advice == "7 GPUs have nothing to do; torchrun --standalone --nproc-per-node=gpu"
    assert str(finding).startswith("! processes ")
    assert look(path)["processes"].advice == "the GPUs are not used (dist.device)"
    all_gpus = World(1, 8, 8, GPU)
    assert look(path, all_gpus)["processes"].advice.startswith("the readers and the loop share a CPU")


def test_a_network_file_system_is_told(write, monkeypatch):
    path = write()
    mounts = [
        SimpleNamespace(mountpoint="/", fstype="ext4"),
        SimpleNamespace(mountpoint=str(Path(path).parent), fstype="nfs4"),
    ]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)
    assert look(path)["data"].value == f"{path} on nfs4"
    assert "network file system" in look(path)["data"].advice


def driver(width: int = 16, reasons: int = 0) -> SimpleNamespace:
    names = {f"nvmlClocksEventReason{name}": 1 << number for number, name in enumerate(result.LIMITS)}
    return SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlSystemGetDriverVersion=lambda: "580.1",
        nvmlDeviceGetCurrPcieLinkWidth=lambda _: width,
        nvmlDeviceGetMaxPcieLinkWidth=lambda _: 16,
        nvmlDeviceGetName=lambda _: "NVIDIA X",
        nvmlDeviceGetCurrentClocksEventReasons=lambda _: reasons,
        **names,
    )


def test_gpus_through_a_stub_of_the_driver(write):
    path = write()
    world = WithGpus(0, 1, 1, CPU)
    assert look(path, world, nvml=driver())["GPU"] == ("GPU", "NVIDIA X, driver 580.1, PCIe x16", "")
    assert look(path, world, nvml=driver(width=4))["GPU"].advice.startswith("its slot has 4 of 16 PCIe lanes")
    assert "HwThermalSlowdown" in look(path, world, nvml=driver(reasons=0b1000))["GPU"].advice
    broken = driver()
    del broken.nvmlDeviceGetName
    assert "nvmlDeviceGetName" in look(path, world, nvml=broken)["not seen"].value
