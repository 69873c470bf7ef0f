"""A stand-in for the module pynvml: two GPUs, of which a test says what they cannot do."""

from types import SimpleNamespace


class NvmlError(Exception):
    """As pynvml's."""


class Nvml:
    """The functions of pynvml that the monitor uses. Those in `missing` raise, as on older GPUs."""

    NVMLError = NvmlError
    NVML_SUCCESS = 0
    NVML_TEMPERATURE_GPU = 0
    NVML_GPM_METRIC_SM_UTIL = 2
    NVML_GPM_METRIC_ANY_TENSOR_UTIL = 5
    NVML_GPM_METRICS_GET_VERSION = 1

    def __init__(self, *missing: str):
        self.missing = missing
        self.n_gpm_samples = 0

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

    def nvmlGpmQueryDeviceSupport(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(isSupportedDevice=1)

    def nvmlGpmSampleAlloc(self) -> object:
        self.n_gpm_samples += 1
        return object()

    def nvmlGpmSampleFree(self, sample: object) -> None:
        self.n_gpm_samples -= 1

    def nvmlGpmSampleGet(self, handle: str, sample: object) -> object:
        return sample

    def c_nvmlGpmMetricsGet_t(self) -> SimpleNamespace:
        return SimpleNamespace(metrics=[SimpleNamespace(nvmlReturn=0, value=0.0) for _ in range(4)])

    def nvmlGpmMetricsGet(self, request: SimpleNamespace) -> None:
        assert request.sample1 is not request.sample2
        for metric in request.metrics[: request.numMetrics]:
            metric.value = {2: 55.0, 5: 22.0}[metric.metricId]

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(used=5 << 30)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 300_000

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return 65
