"""The CPUs and the memory that this process may use."""

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

GIB = 1 << 30
MIB = 1 << 20
CGROUPS = "/sys/fs/cgroup"
CGROUP_V2 = ("memory.max", "memory.current", "")
CGROUP_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
"""(file with the limit, file with what is used, beginning of the names in memory.stat)"""


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
    """What is left of each limit on this process: that of its cgroup, and those of the cgroups around it."""
    try:
        lines = Path("/proc/self/cgroup").read_text().split()
    except OSError:
        lines = ["0::/"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = Path(CGROUPS, controllers and "memory")  # version 1 has a tree for each controller
        limit_name, used_name, prefix = CGROUP_V1 if controllers else CGROUP_V2
        own = Path(root, path.lstrip("/"))
        for folder in [own, *own.parents[: len(own.parts) - len(root.parts)]]:
            try:
                limit = (folder / limit_name).read_text().strip()
                used = int((folder / used_name).read_text())
                stat = (folder / "memory.stat").read_text().split()
            except OSError:  # a container may not see the folder of its cgroup, but sees it as the root
                continue
            values = dict(zip(stat[::2], map(int, stat[1::2]), strict=False))
            in_page_cache = values.get(f"{prefix}inactive_file", 0) + values.get(f"{prefix}active_file", 0)
            if limit != "max":
                yield max(0, int(limit) - used + in_page_cache)


def format_bytes(n_bytes: float) -> str:
    """A size for a message: `1.5 GiB` or `3.2 MiB`."""
    return f"{n_bytes / GIB:.1f} GiB" if n_bytes >= GIB else f"{n_bytes / MIB:.1f} MiB"
