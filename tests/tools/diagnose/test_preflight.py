from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from fastgpu.diagnose import preflight
from fastgpu.process.config import Data, Run
from fastgpu.process.launch import UserError
from fastgpu.process.world import World

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
ALONE = World(0, 1, 1, CPU)


class WithGpus(World):
    """A world whose GPUs have these UUIDs."""

    gpus = ("a",)


def look(
    path: str = "none.h5",
    world: World = ALONE,
    *,
    dataset: str = "none",
    folder: str = "runs",
    nvml: object = None,
) -> dict[str, preflight.Finding]:
    """{topic, or the first word of the value: finding}"""
    data = Data(train=path, val=path, fields={"images": "images", "labels": "labels"}, dataset=dataset)
    findings = preflight.look(data, Run(folder=folder), world, nvml=nvml)
    return {finding.topic or finding.value.split()[0]: finding for finding in findings}


def test_a_machine_that_is_fine(write):
    findings = look(write())
    assert list(findings)[:4] == ["versions", "processes", "memory", "runs"]
    assert torch.__version__ in findings["versions"].value
    assert str(findings["versions"]).startswith("  versions ")
    assert findings["processes"].advice == ""
    assert "(100, 1, 4, 2)" in findings["/images"].value


def test_advice(write, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(preflight, "available_cpus", lambda: 1)
    monkeypatch.setattr(preflight.resource, "getrlimit", lambda _: (256, 256))
    path = write()
    one_gpu = World(0, 1, 1, GPU, local_rank=1)  # the first local rank would ask CUDA for UUIDs
    findings = look(path, one_gpu, folder=str(tmp_path / "not" / "there"))
    assert findings["processes"].advice == "7 GPUs have nothing to do; torchrun --standalone --nproc-per-node=gpu"
    assert findings["memory"].advice.endswith("ulimit -n 4096")
    assert str(findings["processes"]).startswith("! processes ")
    assert look(path)["processes"].advice == "the GPUs are not used (dist.device)"
    all_gpus = World(1, 8, 8, GPU, local_rank=1)
    assert look(path, all_gpus)["processes"].advice.startswith("the readers and the loop share a CPU")
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: SimpleNamespace(free=64 << 20))
    monkeypatch.setattr(preflight.resource, "getrlimit", lambda _: (4096, 4096))
    assert "--shm-size" in look(path, all_gpus)["memory"].advice
    assert not look(path, one_gpu)["memory"].advice
    assert look(path)["runs"].advice.startswith("checkpoints and logs need room")


def test_how_the_files_are_laid_out(write, monkeypatch):
    path = write(200, chunk=8, compression="gzip")
    data = Data(train=[path, path], val=path, fields={"x": "images"})
    findings = preflight.look(data, Run(), ALONE)
    assert any(finding.value == "/images" and finding.advice.startswith("gzip: decoded") for finding in findings)
    assert any(finding.value.startswith(f"{path} and 1 more on ") for finding in findings)
    mounts = [
        SimpleNamespace(mountpoint="/", fstype="ext4"),
        SimpleNamespace(mountpoint=str(Path(path).parent), fstype="nfs4"),
    ]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)
    assert look(path)["data"].value == f"{path} on nfs4"
    assert "network file system" in look(path)["data"].advice
    folder = Path(path).with_suffix("")
    folder.mkdir()
    assert "data" in look(str(folder), dataset="mine:Rows")
    Path(path).write_bytes(np.random.default_rng(0).bytes(100))
    with pytest.raises(UserError, match=r"rows.h5 is not an HDF5 file"):
        look(path)


def driver(width: int = 16, reasons: int = 0) -> SimpleNamespace:
    names = {f"nvmlClocksEventReason{name}": 1 << number for number, name in enumerate(preflight.LIMITS)}
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
