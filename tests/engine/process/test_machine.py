import os
from types import SimpleNamespace

import psutil
import pytest

from fastgpu.process import machine
from fastgpu.process.machine import GIB, MIB, available_cpus, free_host_bytes

FILES = ("cpu.max", "memory.max", "memory.current", "memory.stat")
CACHED = f"anon 5\ninactive_file {GIB}\nactive_file {MIB}\n"


@pytest.mark.parametrize(
    ("cgroup", "cpus", "free"),
    [
        ((), 32, 10 * GIB),  # there is none
        (("max 100000", "max", 5, ""), 32, 10 * GIB),
        (("9900000 100000", 40 * GIB, GIB, ""), 32, 10 * GIB),
        (("50000 100000", GIB, 2 * GIB, ""), 1, 0),
        (("250000 100000", 4 * GIB, 3 * GIB, CACHED), 2, 2 * GIB + MIB),
    ],
)
def test_machine_limits_are_those_of_its_cgroup(tmp_path, monkeypatch, cgroup, cpus, free):
    monkeypatch.setattr(machine, "CGROUPS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)), raising=False)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10 * GIB))
    for name, content in zip(FILES, cgroup, strict=False):
        (tmp_path / name).write_text(str(content))
    assert (available_cpus(), free_host_bytes()) == (cpus, free)


def test_machine_without_proc_has_free_memory(monkeypatch):
    monkeypatch.setattr(psutil, "PROCFS_PATH", "/nowhere")
    assert free_host_bytes() > MIB
