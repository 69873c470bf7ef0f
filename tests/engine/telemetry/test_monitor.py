import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TypeVar

import psutil
import pytest
import torch
from fake_nvml import Nvml, NvmlError
from harness import ALONE, CPU, TIMEOUT_S, needs_gpu

from fastgpu.process.world import World
from fastgpu.telemetry import monitor as monitor_module
from fastgpu.telemetry.monitor import Counters, Monitor, machine_counters

T = TypeVar("T")
POLL_S = 0.01
GPU = {
    "gpu0/util_pct": 60,
    "gpu0/util_min_pct": 60,
    "gpu0/sm_active_pct": 55,
    "gpu0/tensor_active_pct": 22,
    "gpu0/mem_used_gib": 5,
    "gpu0/mem_peak_gib": 3,
    "gpu0/power_w": 300,
    "gpu0/temperature_c": 65,
}
"""What the stand-in for NVML counts."""
HOST = {
    *("host/cpu_user_pct", "host/cpu_system_pct", "host/cpu_iowait_pct"),
    *("host/rss_gib", "host/available_gib", "host/disk_read_mb_per_s"),
}


@pytest.fixture(autouse=True)
def three_gib_of_tensors(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 3 << 30)


@pytest.fixture
def start() -> Iterator[Callable[[Counters], Monitor]]:
    """start(counters) -> a Monitor that reads often and is closed after the test."""
    monitors = []

    def make(counters: Counters) -> Monitor:
        monitors.append(Monitor(ALONE, counters, poll_s=POLL_S))
        return monitors[-1]

    yield make
    for monitor in monitors:
        monitor.close()


def read(counters: Counters) -> dict[str, float]:
    """The values of the second read."""
    counters.read()
    return counters.read()


def wait_for(get: Callable[[], T]) -> T:
    """The first result that is not empty."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        if result := get():
            return result
    pytest.fail("nothing came")


# ---------------------------------------------------------------------------------------------- counters


def test_every_counter_has_its_tag_and_unit():
    nvml = Nvml()
    counters = machine_counters(["a"], nvml)
    values = read(counters)
    assert set(values) == {*GPU, *HOST}
    assert {name: values[name] for name in GPU} == pytest.approx(GPU)
    assert counters.missing == []
    assert values["host/rss_gib"] == pytest.approx(psutil.Process().memory_info().rss / (1 << 30), rel=0.5)
    assert 0 <= values["host/cpu_user_pct"] <= 100
    assert nvml.n_gpm_samples == 1  # the one to compare the next with: NVML frees none


def test_gpus_are_found_by_uuid_and_numbered_as_the_process_sees_them():
    values = read(machine_counters(["b", "a"], Nvml()))
    assert {tag.split("/")[0] for tag in values} == {"gpu0", "gpu1", "host"}


def test_a_counter_that_a_gpu_does_not_have_is_listed_once_and_never_a_zero():
    counters = machine_counters(["a"], Nvml("nvmlDeviceGetPowerUsage", "nvmlGpmQueryDeviceSupport"))
    absent = {"gpu0/power_w", "gpu0/sm_active_pct", "gpu0/tensor_active_pct"}
    assert set(read(counters)) == {*GPU, *HOST} - absent
    assert [text.split(" (")[0] for text in counters.missing] == ["gpu0/sm_activity", "gpu0/power"]


@pytest.mark.parametrize("gpus", [["unknown"], ["a", "unknown"]])
def test_a_gpu_that_the_driver_does_not_know_leaves_the_host(gpus):
    counters = machine_counters(gpus, Nvml())
    assert counters.missing == ["GPU counters (NVML knows no GPU unknown)"]
    assert set(read(counters)) >= HOST


def test_without_a_driver_the_host_is_read_all_the_same(monkeypatch):
    def fail():
        raise NvmlError("Shared Library Not Found")

    monkeypatch.setattr(monitor_module, "open_nvml", fail)
    counters = machine_counters(["a"])
    assert set(read(counters)) == {*HOST, "gpu0/mem_peak_gib"}
    assert counters.missing == ["GPU counters (Shared Library Not Found)"]


# ---------------------------------------------------------------------------------------------- the monitor


def test_means_between_two_calls_and_minima(start):
    samples = iter([(1, 1.0), (70, 200.0), (75, 400.0)])
    is_done = threading.Event()

    def gpu() -> dict[str, float]:
        sample = next(samples, None)
        if sample is None:
            is_done.set()
            return {}
        return dict(zip(("util_min_pct", "power_w"), sample, strict=True))

    monitor = start(Counters({"gpu0/gpu": gpu}, []))
    assert is_done.wait(TIMEOUT_S)
    assert monitor.take() == {"gpu0/util_min_pct": 70, "gpu0/power_w": 300}  # without the first read
    assert monitor.take() == {}


def test_the_cpu_counters_begin_in_the_thread_that_reads_them(start, monkeypatch):
    """psutil compares with the last call of the same thread, so the first value of a thread is a false zero."""
    n_calls: dict[int, int] = {}

    def cpu_times_percent() -> SimpleNamespace:
        thread = threading.get_ident()
        n_calls[thread] = n_calls.get(thread, 0) + 1
        share = 0.0 if n_calls[thread] == 1 else 12.0
        values = {"user": share / 2, "nice": share / 2, "system": share}
        return SimpleNamespace(_asdict=lambda: values)

    monkeypatch.setattr(psutil, "cpu_times_percent", cpu_times_percent)
    counters = machine_counters([])
    counters.read()  # even if another thread has read before
    scalars = wait_for(start(counters).take)
    assert (scalars["host/cpu_user_pct"], scalars["host/cpu_system_pct"]) == (12.0, 12.0)


def test_a_counter_that_breaks_during_the_run_is_told_once_and_does_not_reach_it(start, capsys):
    nvml = Nvml("nvmlDeviceGetPowerUsage")
    monitor = start(machine_counters(["a"], nvml))

    def told() -> str:
        monitor.take()
        return capsys.readouterr().out

    assert wait_for(told) == "not measured here: gpu0/power (nvmlDeviceGetPowerUsage Not Supported)\n"
    nvml.missing += ("nvmlDeviceGetTemperature",)
    assert wait_for(told) == "not measured here: gpu0/temperature (nvmlDeviceGetTemperature Not Supported)\n"
    scalars = wait_for(monitor.take)
    assert "gpu0/temperature_c" not in scalars
    assert scalars["gpu0/mem_used_gib"] == 5
    assert capsys.readouterr().out == ""


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "monitor"]


def test_closing_ends_the_thread_and_other_ranks_have_none(start):
    other = Monitor(World(1, 1, 1, CPU))
    assert not threads()
    assert other.take() == {}
    monitor = start(Counters({"host/rss": lambda: {"rss_gib": 1.0}}, []))
    assert threads()
    monitor.close()
    assert not threads()


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_its_counters_are_there():
    gpus = World(0, 1, 1, torch.device("cuda", 0)).gpus
    busy = torch.randn(4096, 4096, device="cuda")
    busy = busy @ busy / 4096  # loads libraries, which may take seconds
    torch.cuda.synchronize()
    counters = machine_counters(gpus)
    monitor = Monitor(ALONE, counters, poll_s=0.2)
    t0 = time.monotonic()
    while time.monotonic() - t0 < 3:
        busy = busy @ busy / 4096
        torch.cuda.synchronize()
    query = ["nvidia-smi", f"--id=GPU-{gpus[0]}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    used_mib = float(subprocess.run(query, capture_output=True, text=True, check=True).stdout)
    scalars = monitor.take()
    monitor.close()
    assert scalars["gpu0/util_pct"] > 50
    assert scalars["gpu0/mem_used_gib"] == pytest.approx(used_mib / 1024, abs=1)
    assert scalars["gpu0/mem_used_gib"] > 0
    if torch.cuda.get_device_capability() >= (9, 0):
        assert scalars["gpu0/sm_active_pct"] > 50, counters.missing
