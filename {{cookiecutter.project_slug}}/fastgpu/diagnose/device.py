"""What the measurements ask of a device."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch


class Device(Protocol):
    """A device that works off a queue, or the host itself."""

    def synchronize(self) -> None:
        """Wait until everything that is queued has been done."""

    def busy_s(self, work: Callable[[], object]) -> float | None:
        """Seconds in which the device was busy while `work` ran. None: they cannot be told from those of the host."""

    def syncs(self, work: Callable[[], object]) -> list[str]:
        """The lines of code at which `work` made the host wait for the device, as `file.py:12`."""


class TorchDevice:
    """A GPU, or the CPU."""

    def __init__(self, device: torch.device):
        self._device = device
        self._is_gpu = device.type == "cuda"

    def synchronize(self) -> None:
        if self._is_gpu:
            torch.cuda.synchronize(self._device)

    def busy_s(self, work: Callable[[], object]) -> float | None:
        if not self._is_gpu:
            return None
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            work()
            self.synchronize()
        kernels_us = 0.0
        for event in profile.events():
            is_on_device = event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
            if is_on_device and not event.name.startswith("Mem"):
                kernels_us += event.time_range.elapsed_us()
        return kernels_us / 1e6 or None  # a container that forbids profiling shows no kernel at all

    def syncs(self, work: Callable[[], object]) -> list[str]:
        if not self._is_gpu:
            return []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                work()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        places = []
        for warning in caught:
            if "called a synchronizing" in str(warning.message):
                places.append(f"{_shorten(Path(warning.filename))}:{warning.lineno}")
        return list(dict.fromkeys(places))


def _shorten(path: Path) -> str:
    """The path relative to the current folder, or its last two parts."""
    if path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    return "/".join(path.parts[-2:])
