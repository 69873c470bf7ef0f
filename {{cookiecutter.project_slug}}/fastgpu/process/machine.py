"""The CPUs and the memory that this process may use."""

import os
import re
import sys
from contextlib import suppress
from pathlib import Path

import psutil

GIB = 1 << 30
MIB = 1 << 20
CGROUPS = Path("/sys/fs/cgroup")


def lower_priority() -> None:
    """Give this thread, or worker process, a lower priority than the training loop: nice(1) + 5.

    The loop then wakes up in time to queue a step that the device waits for.
    """
    if sys.platform == "linux":  # elsewhere, a thread has the priority of its process
        os.nice(5)


def available_cpus() -> int:
    """Number of CPUs that this process may use: its affinity mask, or the quota of its cgroup if that is lower."""
    n_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = (CGROUPS / "cpu.max").read_text().split()
        n_cpus = max(1, min(n_cpus, int(quota) // int(period)))  # ValueError: the quota is `max`
    return n_cpus


def cpus_of_rank(n_local: int) -> int:
    """Number of CPUs for each of `n_local` ranks on this machine: at least one."""
    return max(1, available_cpus() // n_local)


def free_host_bytes() -> int:
    """Host memory that this process may still allocate: of the machine, or of its cgroups (version 2) if that is less.

    Memory of the page cache counts as free, because the kernel can release it.
    """
    try:
        free = psutil.virtual_memory().available
    except OSError:  # a sandbox without /proc
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    own = CGROUPS
    with suppress(OSError):
        own /= Path("/proc/self/cgroup").read_text().partition("0::/")[2].partition("\n")[0]
    for folder in [own, *own.parents]:
        # A container may see the folder of its cgroup as the root. ValueError: the limit is `max`.
        with suppress(OSError, ValueError):
            limit = int((folder / "memory.max").read_text())
            used = int((folder / "memory.current").read_text())
            cached = re.findall(r"(?m)^(?:in)?active_file (\d+)", (folder / "memory.stat").read_text())
            free = min(free, max(0, limit - used + sum(map(int, cached))))
    return free


def format_bytes(n_bytes: float) -> str:
    """A size for a message: `1.5 GiB` or `3.2 MiB`."""
    return f"{n_bytes / GIB:.1f} GiB" if n_bytes >= GIB else f"{n_bytes / MIB:.1f} MiB"
