"""The CPUs and the memory that this process may use."""

import os
from pathlib import Path

import psutil

GIB = 1 << 30
MIB = 1 << 20


def available_cpus() -> int:
    """CPUs that this process may use: its affinity mask, or the quota of its cgroup if that is less."""
    if hasattr(os, "sched_getaffinity"):
        n_cpus = len(os.sched_getaffinity(0))
    else:  # macOS
        n_cpus = os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return n_cpus
    return n_cpus if quota == "max" else max(1, min(n_cpus, int(quota) // int(period)))


def free_host_bytes() -> int:
    """Host memory that this process may still allocate: of the machine, or of its cgroup if that is less."""
    free = psutil.virtual_memory().available
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except OSError:
        return free
    return free if limit == "max" else min(free, max(0, int(limit) - used))


def format_bytes(n_bytes: float) -> str:
    """A size for a message: `1.5 GiB` or `3.2 MiB`."""
    return f"{n_bytes / GIB:.1f} GiB" if n_bytes >= GIB else f"{n_bytes / MIB:.1f} MiB"
