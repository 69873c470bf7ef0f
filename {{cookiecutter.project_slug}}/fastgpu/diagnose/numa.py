"""Whether the CPUs and the pinned memory of each rank are on the NUMA node of its GPU.

A machine with several sockets has several NUMA nodes: memory of another node is slower, for copies to a GPU, too. Linux
says where things are in /sys (GPUs, CPUs) and /proc/self/numa_maps (memory). What it does not say is left out.
"""

import math
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastgpu.diagnose.preflight import Finding
from fastgpu.process.world import World

PROBE_BYTES = 16 << 20
MAX_SHOWN = 8
"""How many ranks are named."""
CURE = "start with torchrun --numa-binding=node (launch/node.sh does; it needs the program numactl)"


class Location(NamedTuple):
    """Where a rank is. All are numbers, which ranks can exchange as a tensor; NaN: not known."""

    node: float
    """NUMA node of its GPU."""
    cpus_pct: float
    """Share of the CPUs that it may use and that are on other nodes."""
    memory_pct: float
    """Share of a pinned buffer that is on other nodes."""


UNKNOWN = Location(math.nan, math.nan, math.nan)


def find_misplaced(world: World) -> list[Finding]:
    """The ranks of which CPUs or pinned memory are not on the node of their GPU. Every rank has to call it."""
    own = UNKNOWN
    gpu: Any = torch.cuda.get_device_properties(world.device) if world.device.type == "cuda" else None
    if hasattr(gpu, "pci_bus_id"):  # torch 2.6 does not have it
        buffer = torch.ones(PROBE_BYTES, dtype=torch.uint8).pin_memory()
        own = locate(f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0", buffer.data_ptr())
    columns = [world.all_gather(value) for value in own]
    texts = [describe(rank, Location(*values)) for rank, values in enumerate(zip(*columns, strict=True))]
    misplaced = [text for text in texts if text]
    if len(misplaced) > MAX_SHOWN:
        misplaced[MAX_SHOWN:] = [f"{len(misplaced) - MAX_SHOWN} more ranks"]
    return [Finding("NUMA", text, CURE) for text in misplaced]


def describe(rank: int, location: Location) -> str:
    """Empty if nothing is known to be on another node."""
    shares = {"CPUs": location.cpus_pct, "pinned memory": location.memory_pct}
    parts = [f"{pct:.0f} % of its {what}" for what, pct in shares.items() if pct > 0]  # NaN is not
    where = f"rank {rank} has its GPU on node {location.node:.0f} and"
    return f"{where} {' and '.join(parts)} on another" if parts else ""


def locate(bus_id: str, address: int, root: Path = Path("/")) -> Location:
    """Where this process is. bus_id: of its GPU, as in /sys/bus/pci/devices. address: of a pinned buffer."""
    try:
        node = int((root / "sys/bus/pci/devices" / bus_id / "numa_node").read_text())  # -1: not known
        local_cpus = _numbers((root / f"sys/devices/system/node/node{node}/cpulist").read_text())
        pages = _pages(address, (root / "proc/self/numa_maps").read_text())
    except (OSError, ValueError):
        return UNKNOWN
    cpus = os.sched_getaffinity(0)
    elsewhere = sum(pages.values()) - pages.get(node, 0)
    memory_pct = 100 * elsewhere / sum(pages.values()) if pages else math.nan
    return Location(node, 100 * len(cpus - local_cpus) / len(cpus), memory_pct)


def _numbers(ranges: str) -> set[int]:
    """{0, 1, 2, 5} for `0-2,5`."""
    bounds = [part.split("-") for part in ranges.split(",") if part.strip()]
    return {number for bound in bounds for number in range(int(bound[0]), int(bound[-1]) + 1)}


def _pages(address: int, numa_maps: str) -> dict[int, int]:
    """{node: pages} of the mapping that holds an address. Empty: the kernel does not count its pages."""
    mappings = [line.split(" ", 1) for line in numa_maps.splitlines()]
    below = [(int(start, 16), rest) for start, rest in mappings if int(start, 16) <= address]
    counts = re.findall(r"\bN(\d+)=(\d+)", max(below)[1]) if below else []
    return {int(node): int(n_pages) for node, n_pages in counts}
