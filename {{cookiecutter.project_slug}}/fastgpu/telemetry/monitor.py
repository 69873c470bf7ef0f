"""Counters of the machine of rank 0: GPUs through NVML; CPUs, memory and disks through psutil; and additional counters.

If a GPU, its driver or the system lacks a counter, a warning names it once. It is left out, and never logged as 0.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from queue import SimpleQueue
from statistics import fmean
from types import MappingProxyType
from typing import Any, TypeVar

import psutil
import pynvml
import torch

from fastgpu.process.launch import warn
from fastgpu.process.machine import GIB
from fastgpu.process.world import World

T = TypeVar("T")
Counters = dict[str, Callable[[], float | None]]
"""{tag: function that returns its value, or None if there is no new value}"""
HostCounters = Mapping[str, Callable[[], Mapping[str, float]]]
"""{name of the counters, in words: function that returns {tag: value}}"""


class Monitor(AbstractContextManager["Monitor"]):
    """Reads counters from its creation to the end of the context. A thread samples the counters of GPUs."""

    def __init__(self, world: World, more: HostCounters = MappingProxyType({}), *, poll_s: float = 1.0):
        """more: further counters of this process, such as of the bytes that it has read."""
        self._world = world
        self._poll_s = poll_s
        self._counters = gpu_counters(world) if world.is_main else {}
        self._read: SimpleQueue[tuple[str, float]] = SimpleQueue()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        self._thread.start()
        self._host: dict[str, Callable[[], Mapping[str, float]]] = {
            "use of CPUs and memory": _read_host,
            "host/disk_read_mb_per_s": partial(next, _read_disks()),
            **more,
        }
        dict(_read_each(self._host))  # the first interval begins here

    def means(self) -> dict[str, float]:
        """{tag: mean of its values since the last call}, and the minima of GPU use. Empty on other ranks."""
        if not self._world.is_main:
            return {}
        values: defaultdict[str, list[float]] = defaultdict(list)
        while not self._read.empty():
            tag, value = self._read.get()
            values[tag].append(value)
        means = {tag: fmean(read) for tag, read in values.items()}
        minima = {tag.replace("util", "util_min"): min(read) for tag, read in values.items() if "/util" in tag}
        host = {tag: value for _, values in _read_each(self._host) for tag, value in values.items()}
        return means | minima | host

    def __exit__(self, *error: object) -> None:
        """End the thread."""
        self._is_closing.set()
        self._thread.join()

    def _run(self) -> None:
        while self._counters and not self._is_closing.wait(self._poll_s):
            for tag, value in _read_each(self._counters):
                if value is not None:
                    self._read.put((tag, value))


def _read_each(counters: dict[str, Callable[[], T]]) -> Iterator[tuple[str, T]]:
    """(tag, value) of each counter. A counter that raises an exception is dropped with a warning."""
    for tag, function in list(counters.items()):
        try:
            value = function()
        except Exception as error:
            warn(f"{tag} is not measured here ({error})")
            del counters[tag]
        else:
            yield tag, value


def _read_host() -> dict[str, float]:
    """The use of all CPUs since the last call in this thread, and the memory of this process and of the machine."""
    times = psutil.cpu_times_percent()._asdict()
    times["user"] += times.pop("nice", 0.0)  # includes programs of lower priority
    shares = {f"host/cpu_{name}_pct": times[name] for name in ("user", "system", "iowait") if name in times}
    rss_gib = psutil.Process().memory_info().rss / GIB
    return {**shares, "host/rss_gib": rss_gib, "host/available_gib": psutil.virtual_memory().available / GIB}


def _read_disks() -> Iterator[dict[str, float]]:
    """The rate of all disks of this machine since the last value. The first value has no meaning."""
    then = before = 0.0
    while counters := psutil.disk_io_counters():
        now, after = time.monotonic(), counters.read_bytes
        yield {"host/disk_read_mb_per_s": (after - before) / 1e6 / max(1e-9, now - then)}
        then, before = now, after
    raise RuntimeError("this system has no disks")


def gpu_counters(world: World) -> Counters:
    """The counters of the GPUs of this machine's ranks, up to the first GPU that NVML does not know."""
    if world.device.type != "cuda":
        return {}
    counters: Counters = {"gpu0/mem_peak_gib": lambda: torch.cuda.max_memory_allocated(0) / GIB}
    try:
        for number in range(world.local_world_size):
            counters |= _counters_of(number)
    except Exception as error:  # no driver, or a slice of a GPU
        warn(f"GPU is not measured here ({error})")
    return counters


def _counters_of(number: int) -> Counters:
    """The counters of the GPU with this CUDA number. NVML's numbers differ if CUDA hides or reorders GPUs."""
    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(number).uuid}")
    counters: Counters = {
        f"gpu{number}/util_pct": lambda: pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu,  # of the last 1/6 s to 1 s
        f"gpu{number}/mem_used_gib": lambda: pynvml.nvmlDeviceGetMemoryInfo(gpu).used / GIB,
        f"gpu{number}/power_w": lambda: pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
        f"gpu{number}/temperature_c": partial(_temperature, gpu),
    }
    counts_activity = False
    with suppress(Exception):  # an old driver lacks this call
        counts_activity = pynvml.nvmlGpmQueryDeviceSupport(gpu).isSupportedDevice
    if counts_activity:
        of_sms, of_tensor_cores = pynvml.NVML_GPM_METRIC_SM_UTIL, pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL
        counters[f"gpu{number}/sm_active_pct"] = partial(next, _active_pct(gpu, of_sms))
        counters[f"gpu{number}/tensor_active_pct"] = partial(next, _active_pct(gpu, of_tensor_cores))
    elif not number:  # warn once, not for each of eight GPUs
        warn("gpu<n>/sm_active_pct and tensor_active_pct are not measured here (they need Hopper or newer)")
    return counters


def _temperature(gpu: Any) -> float:
    try:
        return float(pynvml.nvmlDeviceGetTemperatureV(gpu, pynvml.NVML_TEMPERATURE_GPU))
    except pynvml.NVMLError_FunctionNotFound:  # older drivers know only the call that CUDA 14 removes
        return float(pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU))


def _active_pct(gpu: Any, metric: int) -> Iterator[float | None]:
    """The percentage of a GPU that was active since the last value. metric: NVML_GPM_METRIC_..."""
    before: Any = None
    while True:
        sample = pynvml.nvmlGpmSampleGet(gpu, pynvml.nvmlGpmSampleAlloc())
        value = None
        if before is not None:
            request = pynvml.c_nvmlGpmMetricsGet_t()
            request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
            request.numMetrics = 1
            request.sample1 = before
            request.sample2 = sample
            request.metrics[0].metricId = metric
            pynvml.nvmlGpmMetricsGet(request)
            pynvml.nvmlGpmSampleFree(before)
            if request.metrics[0].nvmlReturn == pynvml.NVML_SUCCESS:
                value = float(request.metrics[0].value)
        before = sample
        yield value
