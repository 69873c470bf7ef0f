from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from fastgpu.diagnose import preflight
from fastgpu.process.launch import UserError

CPU = torch.device("cpu")


def look(
    path: str = "none.h5", gpus: tuple[str, ...] = (), nvml: object = None, **other: object
) -> dict[str, preflight.Finding]:
    options = {"device": CPU, "local_ranks": 1, "in_workers": False, "folder": "runs"} | other
    found = preflight.look(gpus=gpus, data=path, datasets=["images", "labels"], nvml=nvml, **options)  # type: ignore[arg-type]
    return {each.what or each.value.split()[0]: each for each in found}


def test_a_machine_that_is_fine(write):
    found = look(write())
    assert list(found)[:5] == ["versions", "processes", "room", "runs", "Apex"]
    assert torch.__version__ in found["versions"].value
    assert str(found["versions"]).startswith("  versions ")
    assert found["processes"].advice == ""
    assert "NVIDIA Apex" in found["Apex"].value
    assert "(100, 1, 4, 2)" in found["/images"].value


def test_what_to_do_is_said(write, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(preflight, "cpus", lambda: 1)
    monkeypatch.setattr(preflight.resource, "getrlimit", lambda _: (256, 256))
    found = look(device=torch.device("cuda", 0), folder=str(tmp_path / "not" / "there"))
    assert found["processes"].advice == "7 GPUs have nothing to do; torchrun --standalone --nproc-per-node=gpu"
    assert found["room"].advice.endswith("ulimit -n 4096")
    assert str(found["processes"]).startswith("! processes ")
    assert look()["processes"].advice == "the GPUs are not used (dist.device)"
    found = look(device=torch.device("cuda", 0), local_ranks=8)
    assert found["processes"].advice.startswith("readers and the loop share a CPU")
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: SimpleNamespace(free=64 << 20))
    monkeypatch.setattr(preflight.resource, "getrlimit", lambda _: (4096, 4096))
    assert "--shm-size" in look(in_workers=True)["room"].advice
    assert look(in_workers=True)["runs"].advice.startswith("checkpoints and logs need room")


def test_how_the_data_lies(write, monkeypatch):
    path = write(200, chunk=8, compression="gzip")
    found = preflight.look(CPU, 1, (), [path, path], ["images"], False, "runs")
    assert any(each.value == "/images" and each.advice.startswith("gzip: decoded anew") for each in found)
    assert any(each.value.startswith(f"{path} and 1 more on ") for each in found)
    mounts = [
        SimpleNamespace(mountpoint="/", fstype="ext4"),
        SimpleNamespace(mountpoint=str(Path(path).parent), fstype="nfs4"),
    ]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)
    found = look(path)
    assert found["data"].value == f"{path} on nfs4"
    assert "network file system" in found["data"].advice
    (folder := Path(path).with_suffix("")).mkdir()
    assert "data" in look(str(folder), in_workers=True)  # of a Dataset
    Path(path).write_bytes(np.random.default_rng(0).bytes(100))
    with pytest.raises(UserError, match=r"rows.h5 cannot be read"):
        look(path)


def driver(width: int = 16, reasons: int = 0) -> SimpleNamespace:
    names = {
        f"nvmlClocksEventReason{name}": 1 << number
        for number, name in enumerate(preflight.clock_limits.__globals__["LIMITS"])
    }
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


def test_gpus_through_a_stub_of_the_driver():
    assert look(gpus=("a",), nvml=driver())["GPU"] == ("GPU", "NVIDIA X, driver 580.1, PCIe x16", "")
    assert look(gpus=("a",), nvml=driver(width=4))["GPU"].advice.startswith("its slot has 4 of 16 PCIe lanes")
    assert "HwThermalSlowdown" in look(gpus=("a",), nvml=driver(reasons=0b1000))["GPU"].advice
    broken = driver()
    del broken.nvmlDeviceGetName
    assert "nvmlDeviceGetName" in look(gpus=("a",), nvml=broken)["not seen"].value
