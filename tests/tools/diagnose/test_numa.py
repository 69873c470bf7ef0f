import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from harness import ALONE

from fastgpu.diagnose import numa
from fastgpu.diagnose.numa import Location, describe, find_misplaced, locate

GPU = "0000:dc:00.0"
ADDRESS = 0x7F00_0000_1000
"""In the second mapping of `NUMA_MAPS`."""
NUMA_MAPS = """55d000000000 default file=/usr/bin/python3 mapped=9 N0=9 kernelpagesize_kB=4
7f0000000000 default anon=4096 dirty=4096 N0=1024 N1=3072 kernelpagesize_kB=4
7f0010000000 default stack anon=3 dirty=3 N0=3 kernelpagesize_kB=4
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of two nodes with CPUs 0-3,8-11 and 4-7,12-15; the GPU is on node 1, as are this process's CPUs."""
    files = {
        f"sys/bus/pci/devices/{GPU}/numa_node": "1\n",
        "sys/devices/system/node/node0/cpulist": "0-3,8-11\n",
        "sys/devices/system/node/node1/cpulist": "4-7,12-15\n",
        "proc/self/numa_maps": NUMA_MAPS,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5, 12, 13})
    return tmp_path


def advice(machine: Path, rank: int = 3) -> str:
    """What is said about a rank; empty if it is well."""
    return describe(rank, locate(GPU, ADDRESS, machine))


def test_cpus_and_memory_on_other_nodes_are_named(machine, monkeypatch):
    assert locate(GPU, ADDRESS, machine) == Location(1, 0, 25)
    assert advice(machine) == "rank 3 has its GPU on node 1 and 25 % of its pinned memory on another"
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert "50 % of its CPUs and 25 % of its pinned memory on another" in advice(machine)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    (machine / "proc/self/numa_maps").write_text(NUMA_MAPS.replace("N0=1024 ", ""))
    assert "100 % of its CPUs on another" in advice(machine)


def test_what_is_not_known_is_not_said(machine, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    for text in ("-1\n", "2\n", ""):  # Linux does not know; a node without a list of CPUs; nothing
        (machine / f"sys/bus/pci/devices/{GPU}/numa_node").write_text(text)
        assert advice(machine) == ""
    assert describe(0, locate("0000:00:00.0", ADDRESS, machine)) == ""
    monkeypatch.undo()
    assert find_misplaced(ALONE) == []  # a job without GPUs


def test_an_older_torch_does_not_know_where_a_gpu_is(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name="a GPU"))
    assert find_misplaced(SimpleNamespace(device=torch.device("cuda"), all_gather=lambda value: [value])) == []


@pytest.mark.parametrize("text", ["", NUMA_MAPS.replace("N0=1024 N1=3072 ", ""), "8f0000000000 default N0=1\n"])
def test_memory_whose_pages_the_kernel_does_not_count(machine, text):
    (machine / "proc/self/numa_maps").write_text(text)
    assert advice(machine) == ""


def test_this_machine_says_where_memory_is():
    maps = Path("/proc/self/numa_maps")
    if maps.exists():
        start = next(line for line in maps.read_text().splitlines() if " N" in line).split()[0]
        assert sum(numa._pages(int(start, 16), maps.read_text()).values()) > 0


def test_of_many_ranks_a_few_are_named(monkeypatch):
    class Job:
        """A thousand ranks like this one."""

        device = ALONE.device

        def all_gather(self, value: float) -> list[float]:
            return [100.0] * 1000

    findings = find_misplaced(Job())
    assert len(findings) == numa.MAX_SHOWN + 1
    assert str(findings[-1]).startswith("! NUMA         992 more ranks: start with torchrun --numa-binding=node")
