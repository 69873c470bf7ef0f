"""What is told: processes, GPUs and file system before anything is measured; then what was found out, also as JSON."""

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from fastgpu.diagnose.verdict import MEANING, Measured, Rounds, Verdict
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


LOOP = "the training loop"


def ceilings(m: Measured) -> dict[str, Rounds]:
    """{name: timing} of each part, from the device back to the storage, and of the loop."""
    timings = {
        "compute": m.compute,
        "copy and compute": m.copy,
        "supply from the page cache": m.cached,
        "supply": m.supply,
        LOOP: m.loop,
    }
    return {name: timing for name, timing in timings.items() if timing}


def describe_ratio(ratio: Rounds) -> str:
    """The feed ratio and its noise. The loop cannot be faster than compute alone, so more than 1 is shown as 1."""
    return f"{min(1.0, ratio.median):.2f}, noise +-{100 * ratio.noise:.0f} %"


def sentence(verdict: Verdict) -> str:
    """The meaning of the verdict, and why it was given."""
    return f"{MEANING[verdict.cause]} ({verdict.why})"


def table(title: str, m: Measured, verdict: Verdict) -> str:
    """All numbers and the verdict, for a terminal."""
    lines = [title, f"  {'each part alone':<28}{'ms per step':>12}   {'from - to':<21}{'rows/s':>12}{'of compute':>12}"]
    for name, timing in ceilings(m).items():
        speed = m.compute_s / timing.median
        if "supply" not in name:  # the others include compute: they are faster by noise only
            speed = min(1.0, speed)
        interval = f"{1000 * timing.low:.3f} - {1000 * timing.high:.3f}"
        rows_per_s = m.batch_size / timing.median
        lines.append(f"  {name:<28}{1000 * timing.median:>12.3f}   {interval:<21}{rows_per_s:>12,.0f}{speed:>10.2f} x")
    transform_ms = 1000 * max(0.0, m.transform.median) * m.compute_s
    lines.append(f"  {'transform, part of compute':<28}{transform_ms:>12.3f}")
    if m.busy_s is not None:
        lines.append(f"  {'device busy, part of compute':<28}{1000 * m.busy_s:>12.3f}")
    lines.append(f"feed ratio {describe_ratio(m.feed_ratio)}")
    lines.append(f"{verdict.cause}: {sentence(verdict)}")
    lines.append(f"  certainty {verdict.certainty}")
    if verdict.cause != "COMPUTE":
        lines.append(f"  change    {verdict.change}")
    if verdict.gain > 1:
        rows_per_s = verdict.gain * m.batch_size / m.loop_s
        lines.append(f"  gain      {verdict.gain:.2f} x the speed, predicted: {rows_per_s:,.0f} rows/s")
    if verdict.see_also:
        lines.append(f"  see also  {verdict.see_also}")
    return "\n".join(lines)


def as_json(subject: Mapping[str, Any], m: Measured, verdict: Verdict, findings: Sequence[Finding]) -> dict[str, Any]:
    """Everything as JSON values.

    subject: see `Bench.subject`.
    """
    parts = {}
    for name, timing in ceilings(m).items():
        rows_per_s = m.batch_size / timing.median
        parts[name] = {"step_s": timing.median, "rounds": timing.values, "rows_per_s": rows_per_s}
    return {
        **subject,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "compute_rows_per_s": m.batch_size / m.compute_s,
        "feed_ratio": m.feed_ratio.median,
        "feed_ratio_rounds": m.feed_ratio.values,
        "feed_ratio_shown": describe_ratio(m.feed_ratio),
        "verdict": verdict._asdict(),
        "ceilings": parts,
        "measured": {
            "transform_s": m.transform.median * m.compute_s,
            "busy_s": m.busy_s,
            "syncs": m.syncs,
            "cpu_share": m.cpu_share.median,
            "ranks_compute_s": [timing.median for timing in m.ranks_compute or [m.compute]],
            "ranks_supply_s": [timing.median for timing in m.ranks_supply],
        },
        "preflight": [finding._asdict() for finding in findings],
    }
