"""What the machine does during a run: its GPUs through NVML, its CPUs and memory through psutil, read by one thread.

A counter that a GPU, its driver or this system does not have is named once and left out, never logged as 0.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from queue import SimpleQueue
from statistics import fmean
from typing import Any

import psutil
import torch

from fastgpu.process.launch import warn
from fastgpu.process.machine import GIB
from fastgpu.process.world import World

Counters = dict[str, Callable[[], dict[str, float]]]
"""{name for a message: function that returns {tag: value}}"""


class Monitor(AbstractContextManager["Monitor"]):
    """Reads counters in a thread, from its creation to the end of the context."""

    def __init__(self, world: World, counters: Counters | None = None, *, poll_s: float = 1.0):
        """counters: None stands for those of this machine, on rank 0, and for none on others."""
        if counters is None:
            counters = machine_counters(world.gpus) if world.is_main else {}
        self._counters = counters
        self._poll_s = poll_s
        self._read: SimpleQueue[dict[str, float]] = SimpleQueue()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        self._thread.start()

    def take(self) -> dict[str, float]:
        """{tag: mean of the values since the last call}, the minimum for `*_min_pct`."""
        values: dict[str, list[float]] = {}
        while not self._read.empty():
            for tag, value in self._read.get().items():
                values.setdefault(tag, []).append(value)
        return {tag: min(samples) if tag.endswith("_min_pct") else fmean(samples) for tag, samples in values.items()}

    def __exit__(self, *error: object) -> None:
        """End the thread."""
        self._is_closing.set()
        self._thread.join()

    def _run(self) -> None:
        psutil.cpu_times_percent()  # the first call in a thread returns zeros
        while self._counters and not self._is_closing.wait(self._poll_s):
            for name, function in list(self._counters.items()):
                try:
                    self._read.put(function())
                except Exception as error:  # whatever a driver raises must not stop the run
                    warn(f"{name} is not measured here ({error})")
                    del self._counters[name]


def machine_counters(gpus: Sequence[str]) -> Counters:
    """The counters of this machine. gpus: UUIDs; tags number them from 0."""
    counters: Counters = {"host/cpu": cpu, "host/memory": memory}
    try:
        for number, uuid in enumerate(gpus):
            counters |= gpu_counters(f"gpu{number}", uuid)
    except Exception as error:  # no driver, no module, or a GPU that NVML does not know
        warn(f"GPU is not measured here ({error})")
    if gpus:
        counters["gpu0/peak_memory"] = peak_memory
    return counters


def cpu() -> dict[str, float]:
    """Shares of the time of all CPUs since the last call in this thread."""
    times = psutil.cpu_times_percent()._asdict()
    times["user"] += times.pop("nice", 0.0)  # programs of lower priority use the CPUs, too
    return {f"host/cpu_{name}_pct": times[name] for name in ("user", "system", "iowait") if name in times}


def memory() -> dict[str, float]:
    """The memory of this process, and what programs can still have."""
    return {
        "host/rss_gib": psutil.Process().memory_info().rss / GIB,
        "host/available_gib": psutil.virtual_memory().available / GIB,
    }


def peak_memory() -> dict[str, float]:
    """The maximum so far of the memory that tensors of this process took on its GPU."""
    return {"gpu0/mem_peak_gib": torch.cuda.max_memory_allocated(0) / GIB}


def gpu_counters(group: str, uuid: str) -> Counters:
    """The counters of a GPU. group: of its tags. Raises an error of NVML if the driver does not know the GPU."""
    nvml = open_nvml()
    handle = gpu_handle(nvml, uuid)

    def utilisation() -> dict[str, float]:
        """Of the driver's last interval: 1/6 s to 1 s, depending on the GPU."""
        util_pct = nvml.nvmlDeviceGetUtilizationRates(handle).gpu
        return {f"{group}/util_pct": util_pct, f"{group}/util_min_pct": util_pct}

    def used_memory() -> dict[str, float]:
        return {f"{group}/mem_used_gib": nvml.nvmlDeviceGetMemoryInfo(handle).used / GIB}

    def power() -> dict[str, float]:
        return {f"{group}/power_w": nvml.nvmlDeviceGetPowerUsage(handle) / 1000}

    return {f"{group}/{function.__name__}": function for function in (utilisation, used_memory, power)}


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
