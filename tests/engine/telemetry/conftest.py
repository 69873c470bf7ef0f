"""A stand-in for the module pynvml: two GPUs, of which a test says what they cannot do."""

from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from fastgpu.telemetry import monitor


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The part of pynvml that the monitor uses, on two GPUs, the first of which holds 3 GiB of tensors.

    `uuids`: of the GPUs that CUDA numbers 0 and 1; NVML knows a and b. `samples`: those of GPU activity that were not
    freed; they count up.
    """
    numbers = count(1)
    samples: set[int] = set()

    def take_sample() -> int:
        samples.add(number := next(numbers))
        return number

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
        nvmlDeviceGetTemperature=lambda gpu, sensor: 55,
        nvmlGpmQueryDeviceSupport=lambda gpu: SimpleNamespace(isSupportedDevice=True),
        nvmlGpmSampleAlloc=take_sample,
        nvmlGpmSampleGet=lambda gpu, sample: sample,
        nvmlGpmSampleFree=samples.remove,
        c_nvmlGpmMetricsGet_t=lambda: SimpleNamespace(metrics=[SimpleNamespace()]),
        nvmlGpmMetricsGet=measure,
    )
    monkeypatch.setattr(monitor, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=nvml.uuids[number]))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 3 << 30)
    return nvml


@pytest.fixture
def refuse(nvml: SimpleNamespace) -> Callable[[str], None]:
    """refuse(name): this function of pynvml raises from now on, as on older GPUs."""
    return lambda name: setattr(nvml, name, Mock(side_effect=RuntimeError(f"{name} Not Supported")))
