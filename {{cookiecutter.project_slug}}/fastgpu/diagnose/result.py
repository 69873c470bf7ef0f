"""What is told: processes, GPUs and file system before anything is measured; then what was found out, also as JSON."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from fastgpu.diagnose.verdict import ADVICE, MEANING, Measured, Rounds, Verdict
from fastgpu.process.config import Data
from fastgpu.process.machine import available_cpus
from fastgpu.process.world import World
from fastgpu.storage.file import split_group
from fastgpu.telemetry.monitor import gpu_handle, open_nvml

# beginnings of the names of network file systems
NETWORK = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "9p", "fuse.", "virtiofs", "glusterfs", "afs")
LIMITS = ("SwPowerCap", "HwSlowdown", "SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown")
"""The reasons (nvmlClocksEventReason<name>) that hold the clocks down although there is work."""


def look(data: Data, world: World) -> list[str]:
    """A line about everything that is worth a look before measuring. Those that begin with ! name a cure."""
    lines = [_processes(world)]
    try:
        lines += [_gpu(uuid) for uuid in world.gpus]
    except Exception as error:  # a driver that does not answer
        lines.append(f"! GPUs         not seen: {error}")
    paths = [data.train] if isinstance(data.train, str) else list(data.train)
    return [*lines, _file_system(paths[0])]


def _line(topic: str, value: str, advice: str = "") -> str:
    return f"! {topic:<12} {value}: {advice}" if advice else f"  {topic:<12} {value}"


def _processes(world: World) -> str:
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
    return _line("processes", f"{n_ranks} here, {cpus_per_rank:g} CPUs each, {n_gpus} GPUs visible", advice)


def _gpu(uuid: str) -> str:
    nvml = open_nvml()
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
    return _line("GPU", f"{nvml.nvmlDeviceGetName(handle)}, PCIe x{n_lanes}", advice)


def _file_system(path: str) -> str:
    place = Path(split_group(path)[0]).resolve()
    mounts = [mount for mount in psutil.disk_partitions(all=True) if place.is_relative_to(mount.mountpoint)]
    kind = max(mounts, key=lambda mount: len(mount.mountpoint)).fstype if mounts else "an unknown file system"
    is_network = kind.startswith(NETWORK)
    return _line("data", f"{path} on {kind}", "the first epoch is no faster than the network" if is_network else "")


def ceilings(m: Measured) -> dict[str, Rounds]:
    """{name: timing} of each part, from the device back to the storage, and of the loop."""
    timings = {
        "compute": m.compute,
        "copies": m.copy,
        "supply from the page cache": m.cached,
        "supply": m.supply,
        "the training loop": m.loop,
    }
    return {name: timing for name, timing in timings.items() if timing}


def table(title: str, m: Measured, verdict: Verdict) -> str:
    """All numbers and the verdict, for a terminal."""
    compute_s = m.compute.median
    lines = [title, f"  {'each part alone':<28}{'ms per step':>12}   {'from - to':<21}{'rows/s':>12}{'of compute':>12}"]
    for name, timing in ceilings(m).items():
        speed = compute_s / timing.median
        if timing is m.loop:  # it includes compute: it is faster by noise only
            speed = min(1.0, speed)
        interval = f"{1000 * timing.low:.3f} - {1000 * timing.high:.3f}"
        rows_per_s = m.batch_size / timing.median
        lines.append(f"  {name:<28}{1000 * timing.median:>12.3f}   {interval:<21}{rows_per_s:>12,.0f}{speed:>10.2f} x")
    lines.append(f"  {'transform, part of compute':<28}{1000 * max(0.0, m.transform.median) * compute_s:>12.3f}")
    if m.busy_s is not None:
        lines.append(f"  {'device busy, part of compute':<28}{1000 * m.busy_s:>12.3f}")
    lines.append(f"feed ratio {min(1.0, m.feed_ratio.median):.2f}, noise +-{100 * m.feed_ratio.noise:.0f} %")
    lines.append(f"{verdict.cause}: {MEANING[verdict.cause]} ({verdict.why})")
    if verdict.change:
        rows_per_s = verdict.gain * m.batch_size / m.loop.median
        lines.append(f"  change    {verdict.change}")
        lines.append(f"  gain      {verdict.gain:.2f} x the speed, predicted: {rows_per_s:,.0f} rows/s")
    if verdict.free_echo:
        lines.append(f"  echo      data.echo={verdict.free_echo:g} trains on each row that often in the same time")
    lines.append(f"  see also  {ADVICE[verdict.cause]}")
    return "\n".join(lines)


def as_json(title: str, m: Measured, verdict: Verdict, preflight: Sequence[str]) -> dict[str, Any]:
    """Everything as JSON values. Times are seconds per step."""
    parts = {
        name: {"rows_per_s": m.batch_size / timing.median, "step_s": timing.values}
        for name, timing in ceilings(m).items()
    }
    return {
        "title": title,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "preflight": list(preflight),
        "verdict": verdict._asdict(),
        "feed_ratio": m.feed_ratio.median,
        "parts": parts,
        "transform_share": m.transform.median,
        "busy_s": m.busy_s,
        "syncs": m.syncs,
        "cpu_share": m.cpu_share.median,
        "ranks_compute_s": [timing.median for timing in m.ranks_compute],
        "ranks_supply_s": [timing.median for timing in m.ranks_supply],
    }
