"""A stand-in for the module pynvml: two GPUs, of which a test says what they cannot do."""

from types import SimpleNamespace

import pytest
import torch

from fastgpu.telemetry import monitor


class NvmlError(Exception):
    """As pynvml's."""


class Nvml:
    """The functions of pynvml that the monitor uses. Those in `missing` raise, as on older GPUs."""

    NVML_TEMPERATURE_GPU = 0
    NVML_SUCCESS = 0
    NVML_GPM_METRIC_SM_UTIL = 2
    NVML_GPM_METRIC_ANY_TENSOR_UTIL = 5
    NVML_GPM_METRICS_GET_VERSION = 1

    def __init__(self) -> None:
        self.missing: set[str] = set()
        self.samples: set[int] = set()
        """The samples of GPU activity that were not freed. They count up."""
        self.n_samples = 0
        self.is_hopper = True
        self.uuids = "ab"
        """The UUIDs of the GPUs that CUDA numbers 0 and 1. NVML knows a and b."""

    def __getattribute__(self, name: str):
        if name.startswith("nvml") and name in self.missing:
            raise NvmlError(f"{name} Not Supported")
        return super().__getattribute__(name)

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

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return 55

    def nvmlGpmQueryDeviceSupport(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(isSupportedDevice=self.is_hopper)

    def nvmlGpmSampleAlloc(self) -> int:
        self.n_samples += 1
        self.samples.add(self.n_samples)
        return self.n_samples

    def nvmlGpmSampleGet(self, handle: int, sample: int) -> int:
        return sample

    def nvmlGpmSampleFree(self, sample: int) -> None:
        self.samples.remove(sample)

    def c_nvmlGpmMetricsGet_t(self) -> SimpleNamespace:
        return SimpleNamespace(metrics=[SimpleNamespace()])

    def nvmlGpmMetricsGet(self, request: SimpleNamespace) -> None:
        assert (request.version, request.numMetrics) == (1, 1)
        (metric,) = request.metrics
        metric.value = 10 * metric.metricId + request.sample2 - request.sample1
        metric.nvmlReturn = 0


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    """Two GPUs, the first of which holds 3 GiB of tensors."""
    nvml = Nvml()
    monkeypatch.setattr(monitor, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=nvml.uuids[number]))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 3 << 30)
    return nvml
