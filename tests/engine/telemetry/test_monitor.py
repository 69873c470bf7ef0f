import re
import threading
import time
from collections.abc import Callable
from itertools import count
from queue import SimpleQueue
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
import torch

from fastgpu.process.machine import GIB
from fastgpu.process.world import World
from fastgpu.report.results import read_run
from fastgpu.telemetry import monitor as monitor_module
from fastgpu.telemetry.clock import Throughput
from fastgpu.telemetry.monitor import Counters, Monitor, gpu_counters
from support import PROJECT
from support.ranks import ALONE, CPU, TIMEOUT_S, needs_gpu, wait_until
from support.runs import train

GPU = World(0, 1, 1, torch.device("cuda", 0))
TWO_GPUS = World(0, 2, 2, torch.device("cuda", 0))


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The part of pynvml that the monitor uses, on two GPUs, the first of which holds 3 GiB of tensors.

    `uuids`: of the GPUs that CUDA numbers 0 and 1; NVML knows a and b. `samples`: those of GPU activity that were not
    freed; they count up.
    """
    numbers = count(1)
    samples: list[int] = []

    def take_sample() -> int:
        samples.append(next(numbers))
        return samples[-1]

    def measure(request: SimpleNamespace) -> None:
        assert (request.version, request.numMetrics) == (1, 1)
        (metric,) = request.metrics
        metric.value = 10 * metric.metricId + request.sample2 - request.sample1
        metric.nvmlReturn = 0

    nvml = SimpleNamespace(
        uuids="ab",
        samples=samples,
        NVML_TEMPERATURE_GPU=0,
        NVML_SUCCESS=0,
        NVML_GPM_METRIC_SM_UTIL=2,
        NVML_GPM_METRIC_ANY_TENSOR_UTIL=5,
        NVML_GPM_METRICS_GET_VERSION=1,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=["GPU-a", "GPU-b"].index,
        nvmlDeviceGetUtilizationRates=lambda gpu: SimpleNamespace(gpu=60 + gpu),
        nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(used=5 << 30),
        nvmlDeviceGetPowerUsage=lambda gpu: 300_000,
        NVMLError_FunctionNotFound=NotImplementedError,
        nvmlDeviceGetTemperatureV=lambda gpu, sensor: 55,
        nvmlDeviceGetTemperature=lambda gpu, sensor: 54,
        nvmlGpmQueryDeviceSupport=lambda gpu: SimpleNamespace(isSupportedDevice=True),
        nvmlGpmSampleAlloc=take_sample,
        nvmlGpmSampleGet=lambda gpu, sample: sample,
        nvmlGpmSampleFree=samples.remove,
        c_nvmlGpmMetricsGet_t=lambda: SimpleNamespace(metrics=[SimpleNamespace()]),
        nvmlGpmMetricsGet=measure,
    )
    monkeypatch.setattr(monitor_module, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=nvml.uuids[number]))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 3 << 30)
    return nvml


@pytest.fixture
def refuse(nvml: SimpleNamespace) -> Callable[[str], None]:
    """refuse(name): this function of pynvml raises from now on, as on older GPUs."""
    return lambda name: setattr(nvml, name, Mock(side_effect=RuntimeError(f"{name} Not Supported")))


@pytest.fixture
def counters(monkeypatch) -> Counters:
    """What a Monitor reads in place of GPUs."""
    counters: Counters = {}
    monkeypatch.setattr(monitor_module, "gpu_counters", lambda world: counters)
    return counters


@pytest.fixture
def told(monkeypatch) -> SimpleQueue[str]:
    """The warnings: what is printed while capsys is read would be lost."""
    told: SimpleQueue[str] = SimpleQueue()
    monkeypatch.setattr(monitor_module, "warn", told.put)
    return told


def test_monitor_numbers_gpus_by_uuid(nvml):
    nvml.uuids = "ba"
    values = {tag: function() for tag, function in gpu_counters(TWO_GPUS).items() if "active" not in tag}
    of_both = {"mem_used_gib": 5, "power_w": 300, "temperature_c": 55}
    expected = {f"gpu{number}/{name}": value for number in (0, 1) for name, value in of_both.items()}
    assert values == expected | {"gpu0/mem_peak_gib": 3, "gpu0/util_pct": 61, "gpu1/util_pct": 60}
    assert gpu_counters(ALONE) == {}


def test_monitor_temperature_of_an_older_driver(nvml):
    nvml.nvmlDeviceGetTemperatureV = Mock(side_effect=NotImplementedError)
    assert gpu_counters(GPU)["gpu0/temperature_c"]() == 54


def test_monitor_activity_between_two_samples(nvml):
    counters = gpu_counters(GPU)
    tags = ("sm", "tensor", "sm", "sm", "tensor")  # the other counter takes samples between them
    assert [counters[f"gpu0/{tag}_active_pct"]() for tag in tags] == [None, None, 20 + 2, 20 + 1, 50 + 3]
    assert len(nvml.samples) == 2


@pytest.mark.parametrize("answer", [Mock(return_value=SimpleNamespace(isSupportedDevice=0)), Mock(side_effect=OSError)])
def test_monitor_gpus_without_activity_counters(nvml, capsys, answer):
    nvml.nvmlGpmQueryDeviceSupport = answer
    counters = gpu_counters(TWO_GPUS)
    assert {"gpu0/power_w", "gpu1/power_w"} <= counters.keys()
    assert not any("active" in tag for tag in counters)
    assert capsys.readouterr().out.count("not measured here (they need Hopper or newer)") == 1


@pytest.mark.parametrize(("refused", "uuids"), [("nvmlInit", "ab"), ("", "xb")])
def test_monitor_gpus_unknown_to_the_driver(nvml, refuse, capsys, refused, uuids):
    nvml.uuids = uuids
    refuse(refused)
    assert set(gpu_counters(TWO_GPUS)) == {"gpu0/mem_peak_gib"}
    assert capsys.readouterr().out.startswith("warning: GPU is not measured here (")


def test_monitor_host_values_of_psutil(monkeypatch):
    cpus = [{"user": user, "nice": 2.0, "system": 12.0} for user in (4.0, 8.0)]
    cpu_times = [SimpleNamespace(_asdict=Mock(return_value=values)) for values in cpus]
    disk_counters = [SimpleNamespace(read_bytes=10e6), SimpleNamespace(read_bytes=40e6)]
    monkeypatch.setattr(psutil, "cpu_times_percent", Mock(side_effect=cpu_times))
    monkeypatch.setattr(psutil, "disk_io_counters", Mock(side_effect=disk_counters))
    monkeypatch.setattr(monitor_module, "time", SimpleNamespace(monotonic=Mock(side_effect=[100.0, 102.0])))
    with Monitor(ALONE) as monitor:  # the first value of psutil is about the time before
        values = monitor.means()
    assert values.pop("host/rss_gib") == pytest.approx(psutil.Process().memory_info().rss / (1 << 30), rel=0.5)
    assert values.pop("host/available_gib") > 0
    assert values == {"host/cpu_user_pct": 10.0, "host/cpu_system_pct": 12.0, "host/disk_read_mb_per_s": 15.0}


def test_monitor_without_disks(monkeypatch, capsys):
    monkeypatch.setattr(psutil, "disk_io_counters", lambda: None)
    with Monitor(ALONE) as monitor:
        assert "host/disk_read_mb_per_s" not in monitor.means()
    assert capsys.readouterr().out.count("warning: host/disk_read_mb_per_s is not measured here (") == 1


def test_monitor_host_counters_that_fail_later(monkeypatch, capsys):
    with Monitor(ALONE) as monitor:
        monkeypatch.setattr(psutil, "disk_io_counters", lambda: None)
        monkeypatch.setattr(psutil, "virtual_memory", Mock(side_effect=OSError("no /proc")))
        assert [monitor.means(), monitor.means()] == [{}, {}]
    printed = capsys.readouterr().out
    for what in ("use of CPUs and memory is not measured here (no /proc)", "disk_read_mb_per_s is not measured here ("):
        assert printed.count(what) == 1


def test_monitor_means_and_minima_between_calls(counters, told):
    counters["gpu0/util_pct"] = Mock(side_effect=[70, 75])
    counters["gpu0/power_w"] = Mock(side_effect=[200.0, 400.0])
    with Monitor(ALONE, poll_s=0.01) as monitor, Monitor(World(1, 1, 1, CPU)) as of_another_rank:
        for _ in range(2):
            told.get(timeout=TIMEOUT_S)  # a counter has no more values
        taken, later = monitor.means(), monitor.means()
        assert of_another_rank.means() == {}
    expected = {"gpu0/util_pct": 72.5, "gpu0/util_min_pct": 70, "gpu0/power_w": 300}
    assert {tag: value for tag, value in taken.items() if tag.startswith("gpu")} == expected
    assert not expected.keys() & later.keys()
    assert "monitor" not in {thread.name for thread in threading.enumerate()}


def test_monitor_counter_that_breaks_is_reported_once(counters, told, refuse):
    refuse("nvmlDeviceGetPowerUsage")
    counters |= gpu_counters(GPU)
    text = "gpu0/{} is not measured here ({} Not Supported)"
    with Monitor(ALONE, poll_s=0.01) as monitor:
        assert told.get(timeout=TIMEOUT_S) == text.format("power_w", "nvmlDeviceGetPowerUsage")
        refuse("nvmlDeviceGetMemoryInfo")
        assert told.get(timeout=TIMEOUT_S) == text.format("mem_used_gib", "nvmlDeviceGetMemoryInfo")
        monitor.means()
        wait_until(lambda: "gpu0/util_pct" in monitor.means())  # the other counters are read on
    assert told.empty()


@pytest.mark.gpu
@pytest.mark.real_gpu
@needs_gpu
def test_monitor_counters_of_a_real_gpu():
    busy = torch.randn(4096, 4096, device="cuda")
    busy = busy @ busy / 4096  # loads libraries, which may take seconds
    torch.cuda.synchronize()
    with Monitor(GPU, poll_s=0.2) as monitor:
        t0 = time.monotonic()
        while time.monotonic() - t0 < 3:
            busy = busy @ busy / 4096
            torch.cuda.synchronize()
        free_bytes, all_bytes = torch.cuda.mem_get_info(0)
        scalars = monitor.means()
    assert scalars["gpu0/util_pct"] > 50
    assert 0 < scalars["gpu0/mem_used_gib"] == pytest.approx((all_bytes - free_bytes) / GIB, abs=1)


@pytest.mark.skipif(not psutil.LINUX, reason="other systems lack some counters")
def test_monitor_scalars_are_those_of_the_page(folder, nvml):
    train("train.epochs=1")
    points = read_run(folder / "runs/a").points
    logged = {name for point in points for name in point} - {"step", "time_s", "part", *Throughput._fields}
    logged |= {"val/loss", "val/night/loss"}  # of other workloads, and of several validation sets
    logged |= {"storage/requests", "storage/fetched_mib", "storage/local_pct"}  # of a bucket
    logged |= {"gpu0/util_min_pct", *gpu_counters(GPU)}
    page = (PROJECT / "docs/measuring.md").read_text(encoding="utf-8")
    explained = re.findall(r"(?m)^\| `([^`|]+/[^`|]+)` \| [^|]* \| [^|]+ \| [^|]*\|$", page)
    patterns = {
        name: name.replace("<n>", r"\d+").replace("<metric>", r"\w+").replace("<name>", r"\w+") for name in explained
    }
    assert [name for name in logged if not any(re.fullmatch(pattern, name) for pattern in patterns.values())] == []
    assert [name for name in explained if not any(re.fullmatch(patterns[name], each) for each in logged)] == []
