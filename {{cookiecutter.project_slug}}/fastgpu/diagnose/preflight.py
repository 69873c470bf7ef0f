"""What can be known before anything is measured: versions, devices, room, and how the data lies."""

import resource
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import psutil
import torch

from fastgpu.process.launch import UserError
from fastgpu.process.machine import available_cpus, free_host_bytes
from fastgpu.storage.inspection import advise, columns_of
from fastgpu.storage.store import expand
from fastgpu.telemetry.monitor import clock_limits, gpu_handle, open_nvml
from fastgpu.training import apex

NETWORK = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "9p", "fuse.", "virtiofs", "glusterfs", "afs")
MIN_FILES, MIN_SHM, MIN_DISK = 1024, 1 << 30, 2 << 30
GIB = 1 << 30


class Finding(NamedTuple):
    """One thing that was looked at."""

    what: str
    value: str
    advice: str = ""
    """What to do about it; empty: it is fine."""

    def __str__(self) -> str:
        return f"{'!' if self.advice else ' '} {self.what:<12} {self.value}" + (f": {self.advice}" * bool(self.advice))


def look(
    device: torch.device,
    local_ranks: int,
    gpus: Sequence[str],
    data: str | Sequence[str],
    datasets: Sequence[str],
    in_workers: bool,
    folder: str,
    nvml: Any = None,
) -> list[Finding]:
    """Look at this machine.

    gpus: UUIDs of those in use. data: files, `file.h5` or `file.h5::/group`, or a glob; or what a Dataset is made of
    (in_workers). datasets: names of those that are read. folder: where runs are kept. What cannot be seen is left out.
    """
    found = [
        Finding(
            "versions",
            f"python {sys.version.split()[0]}, torch {torch.__version__}, h5py {h5py.__version__} "
            f"(HDF5 {h5py.version.hdf5_version})",
        ),
        _processes(device, local_ranks),
        _room(local_ranks, in_workers),
        _disk(folder),
    ]
    for uuid in gpus:
        found += _seen(_gpu, nvml, uuid)
    why = apex.reason_against("optimizers", "FusedAdam", "amp_C")
    found.append(Finding("Apex", why or "NVIDIA Apex is there, with its kernels"))
    paths = [data] if isinstance(data, str) else [*data]
    if not in_workers:
        found_files = (each for path in paths for each in expand("data.train", path))
        paths = [file if group == "/" else f"{file}::{group}" for file, group in found_files]
    for path in paths[:1]:
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        found += _seen(_data, path, datasets, more, in_workers)
    return found


def _seen(look_at: Callable[..., Iterator[Finding]], *arguments: Any) -> list[Finding]:
    try:
        return list(look_at(*arguments))
    except UserError:
        raise
    except Exception as error:  # a driver or a system that does not tell
        return [Finding("not seen", str(error))]


def _processes(device: torch.device, local_ranks: int) -> Finding:
    each = available_cpus() / local_ranks
    gpus = torch.cuda.device_count()
    value = f"{local_ranks} here, {each:g} CPUs each" + (f", {gpus} GPUs visible" if gpus else "")
    advice = ""
    if device.type == "cuda" and local_ranks < gpus:
        advice = f"{gpus - local_ranks} GPUs have nothing to do; torchrun --standalone --nproc-per-node=gpu"
    elif device.type == "cpu" and gpus:
        advice = "the GPUs are not used (dist.device)"
    elif device.type == "cuda" and each < 2:
        advice = "readers and the loop share a CPU; give the job more of them"
    return Finding("processes", value, advice)


def _room(local_ranks: int, in_workers: bool) -> Finding:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    value, advice = f"{free_host_bytes() / GIB:.1f} GiB of RAM free, {files:,} open files", ""
    if Path("/dev/shm").exists():
        shm = shutil.disk_usage("/dev/shm").free
        value += f", {shm / GIB:.1f} GiB of /dev/shm"
        if in_workers and shm < MIN_SHM * local_ranks:
            advice = "worker processes hand over batches in /dev/shm; enlarge it (docker run --shm-size=16g)"
    if files < MIN_FILES:
        advice = f"shards, workers and sockets need files; ulimit -n {MIN_FILES * 4}"
    return Finding("room", value, advice)


def _disk(folder: str) -> Finding:
    path = next(each for each in (Path(folder).absolute(), *Path(folder).absolute().parents) if each.exists())
    free = shutil.disk_usage(path).free
    advice = "checkpoints and logs need room; another run.folder" if free < MIN_DISK else ""
    return Finding("runs", f"{free / GIB:.1f} GiB free at run.folder ({folder})", advice)


def _gpu(nvml: Any, uuid: str) -> Iterator[Finding]:
    nvml = nvml or open_nvml()
    handle = gpu_handle(nvml, uuid)
    driver = nvml.nvmlSystemGetDriverVersion()
    width, widest = nvml.nvmlDeviceGetCurrPcieLinkWidth(handle), nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)
    limits = clock_limits(nvml, handle)
    advice = f"its slot has {width} of {widest} PCIe lanes; copies are slower by so much" if width < widest else ""
    if limits:
        advice = f"its clocks are held down ({', '.join(limits)}); look at power and cooling"
    yield Finding("GPU", f"{nvml.nvmlDeviceGetName(handle)}, driver {driver}, PCIe x{width}", advice)


def _data(path: str, datasets: Sequence[str], more: str, in_workers: bool) -> Iterator[Finding]:
    file, _, group = path.partition("::")
    kind = file_system(file)
    slow = f"{kind} is a network file system: the first epoch is as fast as it is" if kind.startswith(NETWORK) else ""
    yield Finding("data", f"{path}{more} on {kind}", slow)
    if in_workers or not Path(file).is_file():
        return
    names = tuple(f"{group.rstrip('/')}/{name.lstrip('/')}" for name in datasets)
    columns = [each for each in columns_of(path) if each.path in names or each.group in names]
    for column in columns[:2]:
        yield Finding("", str(column))
    for line in advise(columns):
        if "checksums" not in line:  # whose absence costs no time
            yield Finding("", *line.split(": ", 1))


def file_system(path: str) -> str:
    """Type of the file system that holds a path, such as ext4 or nfs4."""
    real = Path(path).resolve()
    found = [each for each in psutil.disk_partitions(all=True) if real.is_relative_to(each.mountpoint)]
    return max(found, key=lambda each: len(each.mountpoint)).fstype if found else "a file system of unknown type"
