"""What is known before anything is measured: versions, devices, free memory, and how the files are laid out."""

import resource
import shutil
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import psutil
import torch

from fastgpu.process.config import Data, Run
from fastgpu.process.launch import UserError
from fastgpu.process.machine import GIB, available_cpus, free_host_bytes
from fastgpu.process.world import World
from fastgpu.storage.file import split_group
from fastgpu.storage.inspection import advise, columns_of
from fastgpu.storage.store import expand
from fastgpu.telemetry.monitor import gpu_handle, open_nvml

# beginnings of the names of network file systems
NETWORK = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "9p", "fuse.", "virtiofs", "glusterfs", "afs")
MIN_OPEN_FILES = 1024
MIN_SHM_BYTES = 512 << 20
LIMITS = ("SwPowerCap", "HwSlowdown", "SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown")
"""The reasons (nvmlClocksEventReason<name>) that hold the clocks down although there is work."""
MIN_DISK_BYTES = 2 << 30
MAX_DATASETS_SHOWN = 2


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


def look(data: Data, run: Run, world: World, *, nvml: Any = None) -> list[Finding]:
    """Look at this machine and at the training files. Whatever cannot be seen is left out.

    nvml: the driver's library; None: pynvml. Raises UserError if a training file cannot be read.
    """
    python = sys.version.split()[0]
    versions = f"python {python}, torch {torch.__version__}, h5py {h5py.__version__} (HDF5 {h5py.version.hdf5_version})"
    findings = [
        Finding("versions", versions),
        _processes(world),
        _memory(world),
        _run_folder(run.folder),
    ]
    for part in (_gpus(world, nvml), _files(data)):
        try:
            findings += part
        except UserError:
            raise
        except Exception as error:  # a driver or a system that does not answer
            findings.append(Finding("not seen", str(error)))
    return findings


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


def _memory(world: World) -> Finding:
    max_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    value = f"{free_host_bytes() / GIB:.1f} GiB of RAM free, {max_files:,} open files"
    advice = ""
    if Path("/dev/shm").exists():
        free_shm = shutil.disk_usage("/dev/shm").free
        value += f", {free_shm / GIB:.1f} GiB of /dev/shm"
        if world.device.type == "cuda" and world.local_world_size > 1 and free_shm < MIN_SHM_BYTES:
            advice = "NCCL connects GPUs through /dev/shm, in pieces of 10 MB; enlarge it (docker run --shm-size=1g)"
    if max_files < MIN_OPEN_FILES:
        advice = f"shards, workers and sockets need open files; ulimit -n {MIN_OPEN_FILES * 4}"
    return Finding("memory", value, advice)


def _run_folder(folder: str) -> Finding:
    path = next(path for path in [Path(folder).absolute(), *Path(folder).absolute().parents] if path.exists())
    free = shutil.disk_usage(path).free
    advice = "checkpoints and logs need room; use another run.folder" if free < MIN_DISK_BYTES else ""
    return Finding("runs", f"{free / GIB:.1f} GiB free at run.folder ({folder})", advice)


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


def _files(data: Data) -> Iterator[Finding]:
    """The file system that holds the training files, and how the datasets lie in the first one."""
    paths = [data.train] if isinstance(data.train, str) else list(data.train)
    files = [(path, "/") for path in paths]
    if data.dataset == "none":
        files = list(chain(*(expand("data.train", path) for path in paths)))
    if not files:
        return
    file, group = files[0]
    place = Path(split_group(file)[0]).resolve()
    mounts = [mount for mount in psutil.disk_partitions(all=True) if place.is_relative_to(mount.mountpoint)]
    kind = "a file system of unknown type"
    if mounts:
        kind = max(mounts, key=lambda mount: len(mount.mountpoint)).fstype  # such as ext4 or nfs4
    advice = ""
    if kind.startswith(NETWORK):
        advice = f"{kind} is a network file system: the first epoch is no faster than the network"
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    yield Finding("data", f"{file}{more} on {kind}", advice)
    if data.dataset != "none" or not Path(file).is_file():
        return
    names = {f"{group.rstrip('/')}/{name.lstrip('/')}" for name in data.fields.values()}
    path = file if group == "/" else f"{file}::{group}"
    columns = [column for column in columns_of(path) if column.path in names or column.group in names]
    for column in columns[:MAX_DATASETS_SHOWN]:
        yield Finding("", str(column))
    for line in advise(columns):
        name, advice = line.split(": ", 1)
        if "checksums" not in advice:  # to have none costs no time
            yield Finding("", name, advice)
