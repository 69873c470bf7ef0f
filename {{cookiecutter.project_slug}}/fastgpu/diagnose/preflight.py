"""What is known before anything is measured: processes and CPUs, the GPUs, and the file system of the rows."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from fastgpu.process.config import Data
from fastgpu.process.machine import available_cpus
from fastgpu.process.world import World
from fastgpu.storage.file import split_group
from fastgpu.telemetry.monitor import gpu_handle, open_nvml

# beginnings of the names of network file systems
NETWORK = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "9p", "fuse.", "virtiofs", "glusterfs", "afs")
LIMITS = ("SwPowerCap", "HwSlowdown", "SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown")
"""The reasons (nvmlClocksEventReason<name>) that hold the clocks down although there is work."""


class Finding(NamedTuple):
    """One thing that was looked at."""

    topic: str
    value: str
    advice: str = ""
    """What to do about it. Empty: it is fine."""

    def __str__(self) -> str:
        if self.advice:
            return f"! {self.topic:<12} {self.value}: {self.advice}"
        return f"  {self.topic:<12} {self.value}"


def look(data: Data, world: World, *, nvml: Any = None) -> list[Finding]:
    """Look at this machine and at the training files. nvml: the driver's library; None: pynvml."""
    findings = [_processes(world)]
    try:
        findings += _gpus(world, nvml)
    except Exception as error:  # a driver that does not answer
        findings.append(Finding("not seen", str(error)))
    return findings + _file_system(data)


def _processes(world: World) -> Finding:
    n_ranks = world.local_world_size
    cpus_per_rank = available_cpus() / n_ranks
    n_gpus = torch.cuda.device_count()
    is_gpu = world.device.type == "cuda"
    advice = ""
    if is_gpu and n_ranks < n_gpus:
        advice = f"{n_gpus - n_ranks} GPUs have nothing to do; torchrun --standalone --nproc-per-node=gpu"
    elif n_gpus and not is_gpu:
        advice = "the GPUs are not used (dist.device)"
    elif is_gpu and cpus_per_rank < 2:
        advice = "the readers and the loop share a CPU; give the job more CPUs"
    return Finding("processes", f"{n_ranks} here, {cpus_per_rank:g} CPUs each, {n_gpus} GPUs visible", advice)


def _gpus(world: World, nvml: Any) -> Iterator[Finding]:
    for uuid in world.gpus or []:
        nvml = nvml or open_nvml()
        handle = gpu_handle(nvml, uuid)
        n_lanes = nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)
        max_lanes = nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)
        reasons = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
        limits = [name for name in LIMITS if reasons & getattr(nvml, f"nvmlClocksEventReason{name}")]
        advice = ""
        if n_lanes < max_lanes:
            advice = f"its slot has {n_lanes} of {max_lanes} PCIe lanes; copies are slower by this factor"
        if limits:
            advice = f"its clocks are held down ({', '.join(limits)}); look at power and cooling"
        name = f"{nvml.nvmlDeviceGetName(handle)}, driver {nvml.nvmlSystemGetDriverVersion()}"
        yield Finding("GPU", f"{name}, PCIe x{n_lanes}", advice)


def _file_system(data: Data) -> list[Finding]:
    paths = [data.train] if isinstance(data.train, str) else list(data.train)
    if not paths:
        return []
    place = Path(split_group(paths[0])[0]).resolve()
    mounts = [mount for mount in psutil.disk_partitions(all=True) if place.is_relative_to(mount.mountpoint)]
    kind = "a file system of unknown type"
    if mounts:
        kind = max(mounts, key=lambda mount: len(mount.mountpoint)).fstype  # such as ext4 or nfs4
    advice = ""
    if kind.startswith(NETWORK):
        advice = f"{kind} is a network file system: the first epoch is no faster than the network"
    return [Finding("data", f"{paths[0]} on {kind}", advice)]
