"""What the machine does during a run: its GPUs through NVML, CPUs, memory and disks through psutil, read by one thread.

GPU-Util is the share of time in which some kernel ran, on however few SMs of the GPU. It is taken from the driver's own
buffer of samples, several a second, so nothing is missed between two reads. SM activity, the share of the SMs that
were busy, says more; NVML's GPM has it on Hopper and newer
(https://docs.nvidia.com/deploy/nvml-api/group__nvmlGpmEnums.html).

A counter that a GPU, its driver or this system does not have is listed in `missing` and left out, never logged as 0.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from statistics import fmean
from typing import Any, Self

import psutil
import torch

from fastgpu.process.machine import GIB
from fastgpu.process.world import World

POLL_S = 1.0
MB = 1e6
Counter = Callable[[], dict[str, float]]
"""A function that returns {name: value}; its own name is used in messages."""


class Counters:
    """Counters of a machine that are read together."""

    def __init__(self, counters: Sequence[tuple[str, Counter]], missing: Sequence[str] = ()):
        """counters: (prefix of the tags, counter)."""
        self._counters = list(counters)
        self.missing = list(missing)
        """What could not be read, with the reason. It is not tried again. `Monitor.take` empties this list."""

    def read(self) -> dict[str, float]:
        """{tag: value}. The first values of counters that compare with the read before are missing or 0."""
        values: dict[str, float] = {}
        for prefix, counter in list(self._counters):
            try:
                values |= {prefix + name: value for name, value in counter().items()}
            except Exception as error:  # whatever a driver raises must not stop the run
                self._counters.remove((prefix, counter))
                self.missing.append(f"{prefix}{counter.__name__} ({error})")
        return values


def machine_counters(gpus: Sequence[str], nvml: Any = None) -> Counters:
    """The counters of this machine. gpus: UUIDs; tags number them from 0. nvml: the module pynvml, if it is open."""
    counters: list[tuple[str, Counter]] = [("host/", counter) for counter in _Host().counters]
    missing = []
    try:
        for number, uuid in enumerate(gpus):
            nvml = nvml or open_nvml()
            counters += [(f"gpu{number}/", counter) for counter in _Gpu(nvml, uuid).counters]
    except Exception as error:  # no driver, no module, or a GPU that NVML does not know
        missing.append(f"GPU counters ({error})")
    if gpus:
        counters.append(("gpu0/", peak_memory))
    return Counters(counters, missing)


class Monitor:
    """Reads counters in a thread from its creation to `close`."""

    def __init__(self, world: World, counters: Counters | None = None, *, poll_s: float = POLL_S):
        """counters: None stands for those of this machine, on rank 0, and for none on others."""
        if counters is None and world.is_main:
            counters = machine_counters(world.gpus)
        self._counters = counters or Counters([])
        self._poll_s = poll_s
        self._values: dict[str, list[float]] = {}
        self._lock = threading.Lock()
        self._is_ready = threading.Event()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        if counters:
            self._thread.start()
            self._is_ready.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def take(self) -> dict[str, float]:
        """{tag: mean of the values since the last call}, the minimum for `*_min_pct`. Names what turned out to be
        missing, once, on the terminal."""
        missing = self._counters.missing
        if missing:
            print(f"not measured here: {', '.join(missing)}", flush=True)
            missing.clear()
        with self._lock:
            values = self._values
            self._values = {}
        return {tag: min(samples) if tag.endswith("_min_pct") else fmean(samples) for tag, samples in values.items()}

    def close(self) -> None:
        """End the thread."""
        self._is_closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        """The thread. Its first read is only the beginning of counters that compare with the read before; psutil keeps
        such a beginning for each thread, so it has to happen here."""
        self._counters.read()
        self._is_ready.set()
        while not self._is_closing.wait(self._poll_s):
            values = self._counters.read()
            with self._lock:
                for tag, value in values.items():
                    self._values.setdefault(tag, []).append(value)


# ---------------------------------------------------------------------------------------------- GPUs


def open_nvml() -> Any:
    """The module pynvml, initialised. Raises its NVMLError if there is no driver."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml


def gpu_handle(nvml: Any, uuid: str) -> Any:
    """NVML's handle of a GPU or of a MIG slice. Raises RuntimeError if there is no such GPU."""
    for prefix in ("GPU-", "MIG-", ""):
        with suppress(nvml.NVMLError):
            return nvml.nvmlDeviceGetHandleByUUID(prefix + uuid)
    raise RuntimeError(f"NVML knows no GPU {uuid}")


class _Gpu:
    """Counters of one GPU."""

    def __init__(self, nvml: Any, uuid: str):
        self._nvml = nvml
        self._handle = gpu_handle(nvml, uuid)
        self._last_sample_us = 0
        self._gpm_sample: Any = None
        self.counters = (
            self.utilisation,
            self.sm_activity,
            self.memory,
            self.power,
            self.temperature,
        )

    def utilisation(self) -> dict[str, float]:
        """The driver's samples since the last read."""
        nvml = self._nvml
        kind = nvml.NVML_GPU_UTILIZATION_SAMPLES
        try:
            _, samples = nvml.nvmlDeviceGetSamples(self._handle, kind, self._last_sample_us)
        except nvml.NVMLError_NotFound:  # none is new: depending on the GPU, one comes each 1/6 s to 1 s
            return {}
        new = [sample for sample in samples if sample.timeStamp > self._last_sample_us]
        if not new:
            return {}
        self._last_sample_us = max(sample.timeStamp for sample in new)
        values = [sample.sampleValue.uiVal for sample in new]
        return {"util_pct": fmean(values), "util_min_pct": min(values)}

    def sm_activity(self) -> dict[str, float]:
        """Means between two samples of the GPM; NVML frees none of them itself."""
        nvml = self._nvml
        previous = self._gpm_sample
        if previous is None and not nvml.nvmlGpmQueryDeviceSupport(self._handle).isSupportedDevice:
            raise RuntimeError("needs Hopper or newer")
        self._gpm_sample = nvml.nvmlGpmSampleGet(self._handle, nvml.nvmlGpmSampleAlloc())
        if previous is None:
            return {}
        names = {
            nvml.NVML_GPM_METRIC_SM_UTIL: "sm_active_pct",
            nvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL: "tensor_active_pct",
        }
        request = nvml.c_nvmlGpmMetricsGet_t()
        request.version = nvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(names)
        request.sample1 = previous
        request.sample2 = self._gpm_sample
        for metric, metric_id in zip(request.metrics, names, strict=False):
            metric.metricId = metric_id
        nvml.nvmlGpmMetricsGet(request)
        nvml.nvmlGpmSampleFree(previous)
        metrics = request.metrics[: len(names)]
        return {names[metric.metricId]: metric.value for metric in metrics if metric.nvmlReturn == nvml.NVML_SUCCESS}

    def memory(self) -> dict[str, float]:
        return {"mem_used_gib": self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used / GIB}

    def power(self) -> dict[str, float]:
        return {"power_w": self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000}

    def temperature(self) -> dict[str, float]:
        sensor = self._nvml.NVML_TEMPERATURE_GPU
        return {"temperature_c": self._nvml.nvmlDeviceGetTemperature(self._handle, sensor)}


def peak_memory() -> dict[str, float]:
    """The maximum so far of the memory that tensors of this process took on its GPU."""
    return {"mem_peak_gib": torch.cuda.max_memory_allocated(0) / GIB}


# ---------------------------------------------------------------------------------------------- host


class _Host:
    """Counters of the machine and of this process."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._totals: dict[str, tuple[float, float]] = {}
        """{name: (time, value)} of the last read of a value that only grows"""
        self.counters = [self.cpu, self.memory, self.disk_reads]

    def cpu(self) -> dict[str, float]:
        times = psutil.cpu_times_percent()._asdict()  # since the last call in this thread, and 0 in the first one
        times["user"] += times.pop("nice", 0.0)  # programs of lower priority use the CPUs, too
        return {f"cpu_{name}_pct": times[name] for name in ("user", "system", "iowait") if name in times}

    def memory(self) -> dict[str, float]:
        return {
            "rss_gib": self._process.memory_info().rss / GIB,
            "available_gib": psutil.virtual_memory().available / GIB,
        }

    def disk_reads(self) -> dict[str, float]:
        counters = psutil.disk_io_counters()
        if counters is None:
            raise RuntimeError("this system does not count them")
        return self._rate("disk_read_mb_per_s", counters.read_bytes / MB)

    def _rate(self, name: str, value: float) -> dict[str, float]:
        """{name: growth per second since the last call}; empty the first time."""
        now = time.monotonic()
        then, old_value = self._totals.get(name, (now, value))
        self._totals[name] = (now, value)
        return {name: (value - old_value) / (now - then)} if now > then else {}
