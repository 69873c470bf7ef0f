"""A stand-in for the module pynvml: two GPUs, of which a test says what they cannot do."""

from types import SimpleNamespace

import pytest
import torch

from fastgpu.telemetry import monitor


class NvmlError(Exception):
    """As pynvml's."""


class Nvml:
    """The functions of pynvml that the monitor uses. Those in `missing` raise, as on older GPUs."""

    def __init__(self):
        self.missing: set[str] = set()

    def __getattribute__(self, name: str):
        if name.startswith("nvml") and name in object.__getattribute__(self, "missing"):
            raise NvmlError(f"{name} Not Supported")
        return object.__getattribute__(self, name)

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return ["GPU-a", "GPU-b"].index(uuid)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=60 + handle, memory=10)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(used=5 << 30)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 300_000


def install(monkeypatch: pytest.MonkeyPatch, uuids: str = "ab") -> Nvml:
    """Let CUDA number GPUs with these UUIDs, the first of which holds 3 GiB of tensors, and NVML know a and b."""
    nvml = Nvml()
    monkeypatch.setattr(monitor, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=uuids[number]))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 3 << 30)
    return nvml
