"""What the machine does during a run: its GPUs through NVML, CPUs, memory and disks through psutil, read by one thread.

GPU-Util is the share of time in which some kernel ran, on however few SMs of the GPU, as nvidia-smi shows it. SM
activity, the share of the SMs that were busy, says more; NVML's GPM has it on Hopper and newer
(https://docs.nvidia.com/deploy/nvml-api/group__nvmlGpmEnums.html).

A counter that a GPU, its driver or this system does not have is named once and left out, never logged as 0.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from statistics import fmean
from typing import Any, NamedTuple, Self

import psutil
import torch

from fastgpu.process.machine import GIB
from fastgpu.process.world import World

POLL_S = 1.0


class Counters(NamedTuple):
    """Counters of a machine that are read together."""

    functions: dict[str, Callable[[], dict[str, float]]]
    """{group/name: function that returns {name of a scalar: value}}"""
    missing: list[str]
    """What could not be read, with the reason. It is not tried again. `Monitor.take` empties this list."""

    def read(self) -> dict[str, float]:
        """{tag: value}. The first values of counters that compare with the read before mean nothing."""
        values: dict[str, float] = {}
        for name, function in list(self.functions.items()):
            group = name.partition("/")[0]
            try:
                values |= {f"{group}/{scalar}": value for scalar, value in function().items()}
            except Exception as error:  # whatever a driver raises must not stop the run
                del self.functions[name]
                self.missing.append(f"{name} ({error})")
        return values


def machine_counters(gpus: Sequence[str], nvml: Any = None) -> Counters:
    """The counters of this machine. gpus: UUIDs; tags number them from 0. nvml: the module pynvml, if it is open."""
    disks = _DiskReads()
    counters = Counters({"host/cpu": cpu, "host/memory": memory, "host/disk_reads": disks.read}, [])
    try:
        for number, uuid in enumerate(gpus):
            nvml = nvml or open_nvml()
            gpu = _Gpu(nvml, uuid)
            for function in (gpu.utilisation, gpu.sm_activity, gpu.memory, gpu.power, gpu.temperature):
                counters.functions[f"gpu{number}/{function.__name__}"] = function
    except Exception as error:  # no driver, no module, or a GPU that NVML does not know
        counters.missing.append(f"GPU counters ({error})")
    if gpus:
        counters.functions["gpu0/peak_memory"] = peak_memory
    return counters


class Monitor:
    """Reads counters in a thread from its creation to `close`."""

    def __init__(self, world: World, counters: Counters | None = None, *, poll_s: float = POLL_S):
        """counters: None stands for those of this machine, on rank 0, and for none on others."""
        if counters is None and world.is_main:
            counters = machine_counters(world.gpus)
        self._counters = counters or Counters({}, [])
        self._poll_s = poll_s
        self._values: dict[str, list[float]] = {}
        self._lock = threading.Lock()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        if counters:
            self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def take(self) -> dict[str, float]:
        """{tag: mean of the values since the last call}, the minimum for `*_min_pct`. Names what turned out to be
        missing, once, on the terminal."""
        missing = [*self._counters.missing]
        if missing:
            print(f"not measured here: {', '.join(missing)}", flush=True)
            del self._counters.missing[: len(missing)]  # the thread may add another one meanwhile
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
        self._gpm_sample: Any = None

    def utilisation(self) -> dict[str, float]:
        """That of the driver's last interval: 1/6 s to 1 s, depending on the GPU."""
        util_pct = self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu
        return {"util_pct": util_pct, "util_min_pct": util_pct}

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


def cpu() -> dict[str, float]:
    """Shares of the time of all CPUs since the last call in this thread; 0 in the first one."""
    times = psutil.cpu_times_percent()._asdict()
    times["user"] += times.pop("nice", 0.0)  # programs of lower priority use the CPUs, too
    return {f"cpu_{name}_pct": times[name] for name in ("user", "system", "iowait") if name in times}


def memory() -> dict[str, float]:
    """The memory of this process, and what programs can still have."""
    return {
        "rss_gib": psutil.Process().memory_info().rss / GIB,
        "available_gib": psutil.virtual_memory().available / GIB,
    }


class _DiskReads:
    """Counts what is read from all disks."""

    def __init__(self) -> None:
        self._time = 0.0
        self._n_bytes = 0

    def read(self) -> dict[str, float]:
        """The rate since the last call."""
        counters = psutil.disk_io_counters()
        if counters is None:
            raise RuntimeError("this system does not count them")
        now = time.monotonic()
        rate = (counters.read_bytes - self._n_bytes) / (now - self._time)
        self._time = now
        self._n_bytes = counters.read_bytes
        return {"disk_read_mb_per_s": rate / 1e6}
