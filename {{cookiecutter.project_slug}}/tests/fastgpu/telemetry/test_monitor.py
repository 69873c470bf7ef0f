import threading
import time
from types import SimpleNamespace

import psutil
import pytest
import torch

from fastgpu.process.world import World
from fastgpu.telemetry import monitor as monitor_module
from fastgpu.telemetry.monitor import Monitor

GPU_TAGS = {
    "util_pct",
    "util_min_pct",
    "sm_active_pct",
    "tensor_active_pct",
    "mem_used_gib",
    "mem_peak_gib",
    "power_w",
    "temperature_c",
    "clock_limited_pct",
    "pcie_rx_mb_per_s",
    "pcie_width",
    "energy_j_per_1000_rows",
}
HOST_TAGS = {
    "cpu_user_pct",
    "cpu_system_pct",
    "cpu_iowait_pct",
    "rss_gib",
    "pss_gib",
    "available_gib",
    "disk_read_mb_per_s",
    "page_cache_refaults_per_s",
}
POLL_S = 0.02


class NVMLError(Exception):
    """As pynvml's."""


class Driver:
    """Two GPUs with the functions of pynvml that are used; what `missing` names raises, as on older ones."""

    NVMLError, NVML_SUCCESS = NVMLError, 0
    NVML_GPU_UTILIZATION_SAMPLES, NVML_TEMPERATURE_GPU, NVML_PCIE_UTIL_RX_BYTES = 1, 0, 1
    NVML_GPM_METRIC_SM_UTIL, NVML_GPM_METRIC_ANY_TENSOR_UTIL, NVML_GPM_METRICS_GET_VERSION = 2, 5, 1
    nvmlClocksEventReasonSwPowerCap, nvmlClocksEventReasonHwSlowdown = 4, 8  # noqa: N815
    nvmlClocksEventReasonSwThermalSlowdown, nvmlClocksEventReasonHwThermalSlowdown = 32, 64  # noqa: N815
    nvmlClocksEventReasonHwPowerBrakeSlowdown = 128  # noqa: N815

    def __init__(self, *missing: str, util: tuple[int, ...] = (90, 30, 60), reasons: int = 1):
        self.missing, self.util, self.reasons, self.time_us, self.samples = missing, util, reasons, 0, 0

    def __getattribute__(self, name: str):
        if name.startswith("nvml") and name in object.__getattribute__(self, "missing"):
            raise NVMLError(f"{name} Not Supported")
        return object.__getattribute__(self, name)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in ("GPU-a", "MIG-b"):
            raise NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetSamples(self, handle: str, kind: int, last_us: int) -> tuple:
        assert last_us == self.time_us  # only what is new is asked for
        stamps = [self.time_us + 1 + place for place in range(len(self.util))]
        self.time_us = stamps[-1]
        found = [SimpleNamespace(timeStamp=t, sampleValue=SimpleNamespace(uiVal=v)) for t, v in zip(stamps, self.util)]  # noqa: B905
        return 1, found

    def nvmlGpmQueryDeviceSupport(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(isSupportedDevice=1)

    def nvmlGpmSampleAlloc(self) -> object:
        self.samples += 1
        return object()

    def nvmlGpmSampleFree(self, sample: object) -> None:
        self.samples -= 1

    def nvmlGpmSampleGet(self, handle: str, sample: object) -> object:
        return sample

    def c_nvmlGpmMetricsGet_t(self) -> SimpleNamespace:
        return SimpleNamespace(metrics=[SimpleNamespace(nvmlReturn=0, value=0.0) for _ in range(4)])

    def nvmlGpmMetricsGet(self, asked: SimpleNamespace) -> None:
        assert asked.sample1 is not asked.sample2
        for metric in asked.metrics[: asked.numMetrics]:
            metric.value = {2: 55.0, 5: 22.0}[metric.metricId]

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(used=5 << 30)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 300_000

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return 65

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return self.reasons

    def nvmlDeviceGetPcieThroughput(self, handle: str, which: int) -> int:
        return 12_000_000

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: str) -> int:
        return 16


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(monitor_module, "PSS_EVERY", 2)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 3 << 30)


def watch(driver, gpus: list[str] | None, polls: int = 6) -> tuple[Monitor, dict[str, float]]:
    monitor = Monitor(gpus, nvml=driver, poll_s=POLL_S)
    deadline = time.monotonic() + 10
    while gpus is not None and time.monotonic() < deadline:
        if len(monitor._seen.get("host/rss_gib", [])) >= polls:
            break
        time.sleep(POLL_S / 4)
    found = monitor.scalars(rows_per_s=2000.0)
    monitor.close()
    return monitor, found


def test_every_counter_has_its_tag_and_unit():
    monitor, found = watch(Driver(), ["a"])
    assert set(found) == {f"gpu0/{name}" for name in GPU_TAGS} | {f"host/{name}" for name in HOST_TAGS}
    expected = {
        "util_pct": 60,
        "util_min_pct": 30,
        "sm_active_pct": 55,
        "tensor_active_pct": 22,
        "mem_used_gib": 5,
        "mem_peak_gib": 3,
        "power_w": 300,
        "temperature_c": 65,
        "clock_limited_pct": 0,
        "pcie_rx_mb_per_s": 12_000,
        "pcie_width": 16,
        "energy_j_per_1000_rows": 150,
    }
    assert {name: found[f"gpu0/{name}"] for name in expected} == pytest.approx(expected)
    assert monitor.note == ""
    assert found["host/rss_gib"] == pytest.approx(psutil.Process().memory_info().rss / (1 << 30), rel=0.5)
    assert 0 <= found["host/cpu_user_pct"] <= 100


def test_gpus_are_found_by_uuid_and_numbered_as_the_process_sees_them():
    _, found = watch(Driver("nvmlDeviceGetSamples"), ["b", "a"])
    assert {tag.split("/")[0] for tag in found} == {"gpu0", "gpu1", "host"}


@pytest.mark.parametrize(("reasons", "limited"), [(1, 0), (2, 0), (4, 100), (64 | 1, 100)])
def test_idle_clocks_are_no_limit(reasons, limited):
    assert watch(Driver(reasons=reasons), ["a"], 2)[1]["gpu0/clock_limited_pct"] == limited


def test_what_a_gpu_cannot_tell_is_named_once_and_never_a_zero():
    driver = Driver("nvmlDeviceGetPowerUsage", "nvmlGpmQueryDeviceSupport", "nvmlDeviceGetSamples")
    monitor, found = watch(driver, ["a"])
    gone = {"power_w", "energy_j_per_1000_rows", "sm_active_pct", "tensor_active_pct", "util_pct", "util_min_pct"}
    assert {tag for tag in found if tag.startswith("gpu0/")} == {f"gpu0/{name}" for name in GPU_TAGS - gone}
    for name in ("gpu0/power", "gpu0/sm_activity", "gpu0/utilisation"):
        assert monitor.note.count(name) == 1
    assert monitor.note.startswith("\nnot measured here: ")


@pytest.mark.parametrize("gpus", [["unknown"], ["a", "unknown"]])
def test_a_gpu_that_the_driver_does_not_know_leaves_the_host(gpus):
    monitor, found = watch(Driver(), gpus, 2)
    assert "GPU counters (NVML knows no GPU unknown)" in monitor.note
    assert "host/cpu_user_pct" in found


def test_without_a_driver_the_host_is_watched_all_the_same(monkeypatch):
    def fail():
        raise NVMLError("Shared Library Not Found")

    monkeypatch.setattr(monitor_module, "open_nvml", fail)
    monitor, found = watch(None, ["a"])
    assert "GPU counters (Shared Library Not Found)" in monitor.note
    assert {tag for tag in found if tag.startswith("host/")} == {f"host/{name}" for name in HOST_TAGS}


def test_a_counter_that_breaks_on_the_way_is_told_once_and_does_not_reach_the_run(capsys):
    driver = Driver()
    monitor = Monitor(["a"], nvml=driver, poll_s=POLL_S)
    driver.missing = ("nvmlDeviceGetTemperature",)
    time.sleep(10 * POLL_S)
    monitor.scalars(1.0)
    time.sleep(10 * POLL_S)
    found = monitor.scalars(1.0)
    assert "gpu0/temperature_c" not in found
    assert found["gpu0/pcie_width"] == 16
    monitor.close()
    assert capsys.readouterr().out.count("no longer measured: gpu0/temperature (nvmlDeviceGetTemperature Not Supp") == 1


def test_each_lap_has_its_own_values_and_closing_ends_the_thread():
    driver = Driver(util=(80,))
    monitor, _ = watch(driver, ["a"])
    monitor.scalars(1.0)  # of a look that came before the end
    assert monitor.scalars(1.0) == {}
    assert not [thread for thread in threading.enumerate() if thread.name == "monitor"]
    assert driver.samples <= 1  # of GPM: the one to compare the next with
    monitor.close()


def test_where_nothing_is_to_be_watched_there_is_no_thread():
    monitor, found = watch(None, None)
    assert found == {}
    assert monitor.note == ""
    assert not [thread for thread in threading.enumerate() if thread.name == "monitor"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_its_counters_are_there():
    monitor = Monitor(World(0, 1, 1, torch.device("cuda", 0)).gpus, poll_s=0.2)
    busy, t0 = torch.randn(4096, 4096, device="cuda"), time.monotonic()
    while time.monotonic() - t0 < 3:
        busy = busy @ busy / 4096
        torch.cuda.synchronize()
    found = monitor.scalars(1000.0)
    monitor.close()
    assert found["gpu0/util_pct"] > 50
    assert found["gpu0/mem_used_gib"] > 0
    if torch.cuda.get_device_capability() >= (9, 0):
        assert found["gpu0/sm_active_pct"] > 50, monitor.note
