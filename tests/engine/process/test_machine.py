import os
from pathlib import Path

import psutil
import pytest

from fastgpu.process import machine
from fastgpu.process.machine import GIB, MIB, available_cpus, format_bytes, free_host_bytes


@pytest.fixture
def cgroup(monkeypatch) -> dict[str, str]:
    """The files of a cgroup, by name. A file that is not in it does not exist."""
    files: dict[str, str] = {"memory.stat": ""}

    def read_text(path: Path) -> str:
        if path.name not in files:
            raise FileNotFoundError(path)
        return files[path.name]

    monkeypatch.setattr(machine.Path, "read_text", read_text)
    return files


@pytest.mark.parametrize(
    ("quota", "cpus"),
    [("max 100000", 32), ("250000 100000", 2), ("50000 100000", 1), ("9900000 100000", 32), (None, 32)],
)
def test_cpus_follow_the_affinity_and_the_quota_of_the_cgroup(monkeypatch, cgroup, quota, cpus):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)), raising=False)
    if quota:
        cgroup["cpu.max"] = quota
    assert available_cpus() == cpus


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 10 * GIB),
        ({"memory.max": "max", "memory.current": "5"}, 10 * GIB),
        ({"memory.max": str(4 * GIB), "memory.current": str(GIB)}, 3 * GIB),
        ({"memory.max": str(40 * GIB), "memory.current": str(GIB)}, 10 * GIB),
        ({"memory.max": str(GIB), "memory.current": str(2 * GIB)}, 0),
        (
            {
                "memory.max": str(4 * GIB),
                "memory.current": str(3 * GIB),
                "memory.stat": f"anon 5\ninactive_file {GIB}\nactive_file {MIB}\n",
            },
            2 * GIB + MIB,
        ),
    ],
)
def test_free_memory_is_that_of_the_machine_or_of_its_cgroup(monkeypatch, cgroup, files, free):
    class Memory:
        available = 10 * GIB

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    cgroup.update(files)
    assert free_host_bytes() == free


def test_the_limits_of_this_machine_are_sensible_numbers():
    assert 0 < free_host_bytes() < 1 << 50
    assert available_cpus() >= 1


@pytest.mark.parametrize(
    ("n_bytes", "text"), [(0, "0.0 MiB"), (3.2 * MIB, "3.2 MiB"), (GIB, "1.0 GiB"), (1.5 * GIB, "1.5 GiB")]
)
def test_sizes_are_shown_in_mib_or_gib(n_bytes, text):
    assert format_bytes(n_bytes) == text
