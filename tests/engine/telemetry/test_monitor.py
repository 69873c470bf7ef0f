import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
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
    "gpu0/mem_used_gib": 5,
    "gpu0/mem_peak_gib": 3,
    "gpu0/power_w": 300,
}
"""What the stand-in for NVML counts."""
HOST = {"host/cpu_user_pct", "host/cpu_system_pct", "host/cpu_iowait_pct", "host/rss_gib", "host/available_gib"}


@pytest.fixture
def nvml(monkeypatch) -> Nvml:
    """The driver, whose GPU holds 3 GiB of tensors."""
    nvml = Nvml()
    monkeypatch.setattr(monitor_module, "open_nvml", lambda: nvml)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 3 << 30)
    return nvml


@pytest.fixture
def start() -> Iterator[Callable[[Counters], Monitor]]:
    """start(counters) -> a Monitor that reads often and is closed after the test."""
    monitors = []

    def make(counters: Counters) -> Monitor:
        monitors.append(Monitor(ALONE, counters, poll_s=POLL_S))
        return monitors[-1]

    yield make
    for monitor in monitors:
        monitor.__exit__()


def wait_for(get: Callable[[], T]) -> T:
    """The first result that is not empty."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        if result := get():
            return result
    pytest.fail("nothing came")


def read(counters: Counters) -> dict[str, float]:
    """The values of all counters."""
    return {tag: value for function in counters.values() for tag, value in function().items()}


# ---------------------------------------------------------------------------------------------- counters


def test_every_counter_has_its_tag_and_unit(nvml):
    values = read(machine_counters(["a"]))
    assert set(values) == {*GPU, *HOST}
    assert {name: values[name] for name in GPU} == pytest.approx(GPU)
    assert values["host/rss_gib"] == pytest.approx(psutil.Process().memory_info().rss / (1 << 30), rel=0.5)
    assert 0 <= values["host/cpu_user_pct"] <= 100


def test_gpus_are_found_by_uuid_and_numbered_as_the_process_sees_them(nvml):
    values = read(machine_counters(["b", "a"]))
    assert {tag.split("/")[0] for tag in values} == {"gpu0", "gpu1", "host"}


@pytest.mark.parametrize("gpus", [["unknown"], ["a", "unknown"]])
def test_a_gpu_that_the_driver_does_not_know_leaves_the_host(nvml, gpus, capsys):
    assert set(read(machine_counters(gpus))) >= HOST
    assert capsys.readouterr().out == "warning: GPU is not measured here (NVML knows no GPU unknown)\n"


def test_without_a_driver_the_host_is_read_all_the_same(nvml, monkeypatch, capsys):
    def fail():
        raise NvmlError("Shared Library Not Found")

    monkeypatch.setattr(monitor_module, "open_nvml", fail)
    assert set(read(machine_counters(["a"]))) == {*HOST, "gpu0/mem_peak_gib"}
    assert capsys.readouterr().out == "warning: GPU is not measured here (Shared Library Not Found)\n"


# ---------------------------------------------------------------------------------------------- the monitor


def test_means_between_two_calls_and_minima(start):
    samples = iter([(70, 200.0), (75, 400.0)])
    is_done = threading.Event()

    def gpu() -> dict[str, float]:
        sample = next(samples, None)
        if sample is None:
            is_done.set()
            return {}
        return dict(zip(("gpu0/util_min_pct", "gpu0/power_w"), sample, strict=True))

    monitor = start({"gpu0": gpu})
    assert is_done.wait(TIMEOUT_S)
    assert monitor.take() == {"gpu0/util_min_pct": 70, "gpu0/power_w": 300}
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
    read(counters)  # even if another thread has read before
    scalars = wait_for(start(counters).take)
    assert (scalars["host/cpu_user_pct"], scalars["host/cpu_system_pct"]) == (12.0, 12.0)


def test_a_counter_that_is_missing_or_breaks_is_told_once_and_never_a_zero(start, nvml, monkeypatch):
    told: SimpleQueue[str] = SimpleQueue()  # what is printed while capsys is read would be lost
    monkeypatch.setattr(monitor_module, "warn", told.put)
    nvml.missing += ("nvmlDeviceGetPowerUsage",)
    monitor = start(machine_counters(["a"]))
    text = "gpu0/{} is not measured here ({} Not Supported)"
    assert told.get(timeout=TIMEOUT_S) == text.format("power", "nvmlDeviceGetPowerUsage")
    nvml.missing += ("nvmlDeviceGetMemoryInfo",)
    assert told.get(timeout=TIMEOUT_S) == text.format("used_memory", "nvmlDeviceGetMemoryInfo")
    monitor.take()
    scalars = wait_for(monitor.take)
    assert not {"gpu0/power_w", "gpu0/mem_used_gib"} & set(scalars)
    assert told.empty()


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "monitor"]


def test_closing_ends_the_thread_and_other_ranks_read_nothing(start):
    with Monitor(World(1, 1, 1, CPU), poll_s=POLL_S) as other:
        assert other.take() == {}
    monitor = start({"host/rss": lambda: {"host/rss_gib": 1.0}})
    assert threads()
    monitor.__exit__()
    assert not threads()


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_its_counters_are_there():
    gpus = World(0, 1, 1, torch.device("cuda", 0)).gpus
    busy = torch.randn(4096, 4096, device="cuda")
    busy = busy @ busy / 4096  # loads libraries, which may take seconds
    torch.cuda.synchronize()
    monitor = Monitor(ALONE, machine_counters(gpus), poll_s=0.2)
    t0 = time.monotonic()
    while time.monotonic() - t0 < 3:
        busy = busy @ busy / 4096
        torch.cuda.synchronize()
    query = ["nvidia-smi", f"--id=GPU-{gpus[0]}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    used_mib = float(subprocess.run(query, capture_output=True, text=True, check=True).stdout)
    scalars = monitor.take()
    monitor.__exit__()
    assert scalars["gpu0/util_pct"] > 50
    assert scalars["gpu0/mem_used_gib"] == pytest.approx(used_mib / 1024, abs=1)
    assert scalars["gpu0/mem_used_gib"] > 0
