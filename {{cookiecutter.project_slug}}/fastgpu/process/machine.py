"""What this machine has."""

import os
from pathlib import Path

import psutil


def cpus() -> int:
    """CPUs that this process may use: its affinity, or its cgroup's quota where that is less."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # macOS
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return found
    return found if quota == "max" else max(1, min(found, int(quota) // int(period)))


def free_host_bytes() -> int:
    """RAM that this process may still take: the machine's, or its cgroup's where that is less."""
    free = psutil.virtual_memory().available
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except OSError:
        return free
    return free if limit == "max" else min(free, max(0, int(limit) - used))


def _size(n_bytes: float) -> str:
    return f"{n_bytes / (1 << 30):.1f} GiB" if n_bytes >= 1 << 30 else f"{n_bytes / (1 << 20):.1f} MiB"
