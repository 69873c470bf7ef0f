"""What the machine does meanwhile: its GPUs through NVML, the host through psutil, sampled by one thread.

GPU-Util is the share of time in which some kernel ran, on however few of the GPU's processors. It is taken from the
driver's own buffer of samples, a few a second, so that nothing falls between two looks. SM activity, the share of the
processors that were busy, says more; NVML's GPM has it on Hopper and newer.

A counter that a GPU, its driver or this system does not have is named once in `note` and left out; no zero stands in.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

POLL_S = 1.0
PSS_EVERY = 10  # polls: it takes the kernel a walk over all pages
GIB, MB = 1 << 30, 1e6
LIMITS = ("SwPowerCap", "HwSlowdown", "SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown")
"""Of NVML's nvmlClocksEventReason...: what keeps the clocks down although there is work."""
Counter = Callable[[], dict[str, float]]
Merge = Callable[[dict[str, float]], dict[str, float]]


class Monitor:
    """Samples in a thread from now on; `scalars` gives what passed since it was last called.

    gpus: their UUIDs; None: nothing is sampled. merged: hands on what `scalars` gives, joined with what other machines'
    monitors give. nvml: the module pynvml, or one with its functions.
    """

    def __init__(self, gpus: Sequence[str] | None, merged: Merge = dict, nvml: Any = None, poll_s: float = POLL_S):
        self.note, self._merged = "", merged
        self._seen: dict[str, list[float]] = {}
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._counters: list[tuple[str, Counter]] = []
        self._thread: threading.Thread | None = None
        if gpus is None:
            return
        self._counters += [("host/", counter) for counter in _host()]
        missing = list[str]()
        try:
            for number, names in enumerate(gpus):
                nvml = nvml or open_nvml()
                self._counters += [(f"gpu{number}/", counter) for counter in _gpu(nvml, names)]
        except Exception as error:  # no driver, no module, or a GPU that it does not know
            missing.append(f"GPU counters ({error})")
        if gpus:
            self._counters.append(("gpu0/", _peak_memory))
        missing += self._poll()  # what is missing shows here; what counts up begins here
        self._seen = {}
        if missing:
            self.note = f"\nnot measured here: {', '.join(missing)}"
        self._thread = threading.Thread(target=self._run, args=(poll_s,), name="monitor", daemon=True)
        self._thread.start()

    def scalars(self, rows_per_s: float) -> dict[str, float]:
        """{tag: its mean since last asked}; of `*_min_pct` the least. rows_per_s: trained rows, for energy a row."""
        with self._lock:
            seen, self._seen = self._seen, {}
        found = {tag: (min if tag.endswith("_min_pct") else _mean)(values) for tag, values in seen.items()}
        for tag in [tag for tag in found if tag.endswith("/power_w") and rows_per_s]:
            found[tag.replace("power_w", "energy_j_per_1000_rows")] = 1000 * found[tag] / rows_per_s
        return self._merged(found)

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        if self._thread:
            self._thread.join()
            self._thread = None

    def _run(self, poll_s: float) -> None:
        while not self._closing.wait(poll_s):
            if missing := self._poll():
                print(f"no longer measured: {', '.join(missing)}", flush=True)

    def _poll(self) -> list[str]:
        """Look once; returns the counters that could not be read, which are not asked again."""
        missing = []
        for prefix, counter in list(self._counters):
            try:
                found = counter()
            except Exception as error:  # whatever a driver raises must not reach the run
                self._counters.remove((prefix, counter))
                missing.append(f"{prefix}{counter.__name__.strip('_')} ({error})")
                continue
            with self._lock:
                for name, value in found.items():
                    self._seen.setdefault(prefix + name, []).append(value)
        return missing


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def open_nvml() -> Any:
    """The module pynvml, ready. Raises its NVMLError where there is no driver."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml


def gpu_handle(nvml: Any, uuid: str) -> Any:
    """NVML's handle of a GPU, or of a slice of one. Raises RuntimeError if there is no such GPU."""
    for prefix in ("GPU-", "MIG-", ""):
        with suppress(nvml.NVMLError):
            return nvml.nvmlDeviceGetHandleByUUID(prefix + uuid)
    raise RuntimeError(f"NVML knows no GPU {uuid}")


def clock_limits(nvml: Any, handle: Any) -> list[str]:
    """What keeps a GPU's clocks down now, in NVML's words."""
    reasons = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    return [name for name in LIMITS if reasons & getattr(nvml, f"nvmlClocksEventReason{name}")]


def _gpu(nvml: Any, uuid: str) -> list[Counter]:
    """Counters of one GPU."""
    handle = gpu_handle(nvml, uuid)
    state: dict[str, Any] = {"seen_us": 0, "gpm": None}

    def utilisation() -> dict[str, float]:
        _, samples = nvml.nvmlDeviceGetSamples(handle, nvml.NVML_GPU_UTILIZATION_SAMPLES, state["seen_us"])
        values = [sample.sampleValue.uiVal for sample in samples if sample.timeStamp > state["seen_us"]]
        state["seen_us"] = max([state["seen_us"], *(sample.timeStamp for sample in samples)])
        return {"util_pct": _mean(values), "util_min_pct": min(values)} if values else {}

    def sm_activity() -> dict[str, float]:
        if state["gpm"] is None and not nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            raise RuntimeError("needs Hopper or newer")
        sample = nvml.nvmlGpmSampleGet(handle, nvml.nvmlGpmSampleAlloc())
        before, state["gpm"] = state["gpm"], sample
        if before is None:
            return {}
        asked = nvml.c_nvmlGpmMetricsGet_t()
        metrics = {
            "sm_active_pct": nvml.NVML_GPM_METRIC_SM_UTIL,
            "tensor_active_pct": nvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
        }
        asked.version, asked.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(metrics)
        asked.sample1, asked.sample2 = before, sample
        for place, metric in enumerate(metrics.values()):
            asked.metrics[place].metricId = metric
        nvml.nvmlGpmMetricsGet(asked)
        nvml.nvmlGpmSampleFree(before)
        found = {name: asked.metrics[place] for place, name in enumerate(metrics)}
        return {name: metric.value for name, metric in found.items() if metric.nvmlReturn == nvml.NVML_SUCCESS}

    def memory() -> dict[str, float]:
        return {"mem_used_gib": nvml.nvmlDeviceGetMemoryInfo(handle).used / GIB}

    def power() -> dict[str, float]:
        return {"power_w": nvml.nvmlDeviceGetPowerUsage(handle) / 1000}

    def temperature() -> dict[str, float]:
        return {"temperature_c": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)}

    def clocks() -> dict[str, float]:
        return {"clock_limited_pct": 100.0 * bool(clock_limits(nvml, handle))}

    def pcie() -> dict[str, float]:
        received = nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_RX_BYTES)  # of 20 ms, in KB/s
        return {"pcie_rx_mb_per_s": received / 1000, "pcie_width": nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)}

    return [utilisation, sm_activity, memory, power, temperature, clocks, pcie]


def _host() -> list[Counter]:
    """Counters of the machine and of this process."""
    process, state = psutil.Process(), {"polls": 0}
    psutil.cpu_times_percent()  # counts from here

    def cpu() -> dict[str, float]:
        times = psutil.cpu_times_percent()._asdict()
        return {f"cpu_{name}_pct": times[name] for name in ("user", "system", "iowait") if name in times}

    def memory() -> dict[str, float]:
        state["polls"] += 1
        found = {"rss_gib": process.memory_info().rss / GIB, "available_gib": psutil.virtual_memory().available / GIB}
        if state["polls"] % PSS_EVERY == 0:
            found["pss_gib"] = process.memory_full_info().pss / GIB
        return found

    return [cpu, memory, _rate(_read_mb, "disk_read_mb_per_s"), _rate(_refaults, "page_cache_refaults_per_s")]


def _peak_memory() -> dict[str, float]:
    """Of this process's tensors on its GPU, since it began."""
    return {"mem_peak_gib": torch.cuda.max_memory_allocated(0) / GIB}


def _read_mb() -> float:
    """From all disks, since the machine started."""
    if (counters := psutil.disk_io_counters()) is None:
        raise RuntimeError("this system does not count it")
    return counters.read_bytes / MB


def _refaults() -> float:
    """Pages of files that had been in memory, were dropped, and had to be read again: since the machine started."""
    for line in Path("/proc/vmstat").read_text().splitlines():
        name, value = line.split()
        if name == "workingset_refault_file":
            return float(value)
    raise RuntimeError("this kernel does not count them")


def _rate(read: Callable[[], float], name: str) -> Counter:
    """Of what counts up: its rise a second."""
    state: list[tuple[float, float]] = []

    def rate() -> dict[str, float]:
        now = (time.monotonic(), read())
        before = state[0] if state else now
        state[:] = [now]
        return {name: (now[1] - before[1]) / (now[0] - before[0])} if now[0] > before[0] else {}

    rate.__name__ = name
    return rate
