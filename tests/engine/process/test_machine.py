import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from fastgpu.process import machine
from fastgpu.process.machine import GIB, MIB, available_cpus, free_host_bytes


@pytest.fixture
def cgroup(monkeypatch) -> dict[str, object]:
    """{file of the cgroup: content}, none to begin with. The machine has 32 CPUs and 10 GiB."""
    files: dict[str, object] = {}

    def read_text(path: Path) -> str:
        if path.name not in files:
            raise FileNotFoundError(path)
        return str(files[path.name])

    monkeypatch.setattr(machine.Path, "read_text", read_text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)), raising=False)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10 * GIB))
    return files


@pytest.mark.parametrize(("quota", "cpus"), [("max 100000", 32), ("250000 100000", 2), ("50000 100000", 1)])
def test_cpus_follow_the_affinity_and_the_quota_of_the_cgroup(cgroup, quota, cpus):
    assert available_cpus() == 32
    cgroup["cpu.max"] = quota
    assert available_cpus() == cpus


@pytest.mark.parametrize(
    ("limit", "used", "stat", "free"),
    [
        ("max", 5, "", 10 * GIB),
        (40 * GIB, GIB, "", 10 * GIB),
        (GIB, 2 * GIB, "", 0),
        (4 * GIB, 3 * GIB, f"anon 5\ninactive_file {GIB}\nactive_file {MIB}\n", 2 * GIB + MIB),
    ],
)
def test_free_memory_is_that_of_the_machine_or_of_its_cgroup(cgroup, limit, used, stat, free):
    assert free_host_bytes() == 10 * GIB
    cgroup |= {"memory.max": limit, "memory.current": used, "memory.stat": stat}
    assert free_host_bytes() == free
