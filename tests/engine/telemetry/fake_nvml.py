"""A stand-in for the module pynvml: two GPUs, of which a test says what they cannot do."""

from types import SimpleNamespace


class NvmlError(Exception):
    """As pynvml's."""


class Nvml:
    """The functions of pynvml that the monitor uses. Those in `missing` raise, as on older GPUs."""

    NVMLError = NvmlError

    def __init__(self, *missing: str):
        self.missing = missing

    def __getattribute__(self, name: str):
        if name.startswith("nvml") and name in object.__getattribute__(self, "missing"):
            raise NvmlError(f"{name} Not Supported")
        return object.__getattribute__(self, name)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in ("GPU-a", "MIG-b"):
            raise NvmlError("Not Found")
        return uuid

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(gpu=60, memory=10)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(used=5 << 30)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 300_000
