"""The CPUs and the memory that this process may use."""

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

GIB = 1 << 30
MIB = 1 << 20
CGROUPS = "/sys/fs/cgroup"


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
    """Host memory that this process may still allocate: of the machine, or of its cgroups if that is less.

    What the page cache holds counts as free: the kernel gives it up.
    """
    return min([psutil.virtual_memory().available, *_free_in_cgroups()])


def _free_in_cgroups() -> Iterator[int]:
    """What is left of each limit on this process: of its cgroup (version 2), and of those around it."""
    try:
        lines = Path("/proc/self/cgroup").read_text().split()
    except OSError:
        lines = []
    own = Path(CGROUPS, next((line for line in lines if line.startswith("0::/")), "0::/").removeprefix("0::/"))
    for folder in [own, *own.parents[: len(own.parts) - len(Path(CGROUPS).parts)]]:
        try:
            limit = (folder / "memory.max").read_text().strip()
            used = int((folder / "memory.current").read_text())
            stat = (folder / "memory.stat").read_text().split()
        except OSError:  # a container may not see the folder of its cgroup, but sees it as the root
            continue
        values = dict(zip(stat[::2], map(int, stat[1::2]), strict=False))
        if limit != "max":
            yield max(0, int(limit) - used + values.get("inactive_file", 0) + values.get("active_file", 0))


def format_bytes(n_bytes: float) -> str:
    """A size for a message: `1.5 GiB` or `3.2 MiB`."""
    return f"{n_bytes / GIB:.1f} GiB" if n_bytes >= GIB else f"{n_bytes / MIB:.1f} MiB"
