"""A stand-in for the module pynvml: two GPUs, of which a test says what they cannot do."""

from types import SimpleNamespace


class NvmlError(Exception):
    """As pynvml's."""


class NvmlNotFoundError(NvmlError):
    """As pynvml's NVMLError_NotFound."""


class Nvml:
    """The functions of pynvml that the monitor uses. Those in `missing` raise, as on older GPUs."""

    NVMLError = NvmlError
    NVMLError_NotFound = NvmlNotFoundError
    NVML_SUCCESS = 0
    NVML_GPU_UTILIZATION_SAMPLES = 1
    NVML_TEMPERATURE_GPU = 0
    NVML_PCIE_UTIL_RX_BYTES = 1
    NVML_GPM_METRIC_SM_UTIL = 2
    NVML_GPM_METRIC_ANY_TENSOR_UTIL = 5
    NVML_GPM_METRICS_GET_VERSION = 1
    nvmlClocksEventReasonSwPowerCap = 4
    nvmlClocksEventReasonHwSlowdown = 8
    nvmlClocksEventReasonSwThermalSlowdown = 32
    nvmlClocksEventReasonHwThermalSlowdown = 64
    nvmlClocksEventReasonHwPowerBrakeSlowdown = 128

    def __init__(self, *missing: str, util: tuple[int, ...] = (90, 30, 60), reasons: int = 1):
        self.missing = missing
        self.util = util
        self.reasons = reasons
        self.time_us = 0
        self.n_gpm_samples = 0

    def __getattribute__(self, name: str):
        if name.startswith("nvml") and name in object.__getattribute__(self, "missing"):
            raise NvmlError(f"{name} Not Supported")
        return object.__getattribute__(self, name)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in ("GPU-a", "MIG-b"):
            raise NvmlNotFoundError("Not Found")
        return uuid

    def nvmlDeviceGetSamples(self, handle: str, kind: int, last_us: int) -> tuple:
        assert last_us == self.time_us, "only new samples are asked for"
        if not self.util:
            raise NvmlNotFoundError("Not Found")
        samples = []
        for value in self.util:
            self.time_us += 1
            samples.append(SimpleNamespace(timeStamp=self.time_us, sampleValue=SimpleNamespace(uiVal=value)))
        return 1, samples

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

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return self.reasons

    def nvmlDeviceGetPcieThroughput(self, handle: str, which: int) -> int:
        return 12_000_000

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: str) -> int:
        return 16
