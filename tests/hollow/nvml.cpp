// NVML for the devices of runtime.cpp: fixed numbers, which differ from device to device.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "runtime.h"

constexpr int NOT_FOUND = 6;
constexpr int WRONG_VERSION = 25;
constexpr unsigned GPM_VERSION = 1;

static int n_devices() {
    return setting("HOLLOW_DEVICES", 1);
}

// A handle points to the number of a device, whatever CUDA_VISIBLE_DEVICES says.
static int number_of(const void* handle) {
    return *(const int*)handle;
}

API int nvmlInit_v2() {
    return 0;
}

API int nvmlInitWithFlags(unsigned) {
    return 0;
}

API int nvmlShutdown() {
    return 0;
}

API int nvmlDeviceGetCount_v2(unsigned* count) {
    *count = n_devices();
    return 0;
}

API const char* nvmlErrorString(int) {
    return "an error of the stand-in";
}

API int nvmlDeviceGetHandleByIndex_v2(unsigned number, void** handle) {
    static int numbers[16];
    if ((int)number >= n_devices()) return NOT_FOUND;
    numbers[number] = number;
    *handle = &numbers[number];
    return 0;
}

API int nvmlDeviceGetUUID(const void* handle, char* out, unsigned size) {
    snprintf(out, size, "GPU-00000000-0000-0000-0000-%012x", number_of(handle));
    return 0;
}

API int nvmlDeviceGetHandleByUUID(const char* uuid, void** handle) {
    for (int number = 0; number < n_devices(); number++) {
        char text[64];
        nvmlDeviceGetHandleByIndex_v2(number, handle);
        nvmlDeviceGetUUID(*handle, text, sizeof text);
        if (!strcmp(text, uuid)) return 0;
    }
    return NOT_FOUND;
}

API int nvmlDeviceGetUtilizationRates(const void* handle, unsigned* gpu_and_memory_pct) {
    gpu_and_memory_pct[0] = 40 + number_of(handle);
    gpu_and_memory_pct[1] = 10;
    return 0;
}

API int nvmlDeviceGetMemoryInfo(const void* handle, unsigned long long* total_free_used) {
    total_free_used[0] = 4ull << 30;
    total_free_used[2] = (1ull + number_of(handle)) << 30;
    total_free_used[1] = total_free_used[0] - total_free_used[2];
    return 0;
}

API int nvmlDeviceGetPowerUsage(const void* handle, unsigned* milliwatts) {
    *milliwatts = 1000 * (100 + number_of(handle));
    return 0;
}

API int nvmlDeviceGetTemperatureV(const void* handle, int* version_sensor_celsius) {
    version_sensor_celsius[2] = 50 + number_of(handle);
    return 0;
}

API int nvmlGpmQueryDeviceSupport(const void*, unsigned* version_and_support) {
    version_and_support[1] = setting("HOLLOW_CAPABILITY", 90) >= 90;
    return 0;
}

API int nvmlGpmSampleAlloc(void** sample) {
    *sample = malloc(1);
    return 0;
}

API int nvmlGpmSampleFree(void* sample) {
    free(sample);
    return 0;
}

API int nvmlGpmSampleGet(const void*, void*) {
    return 0;
}

struct GpmMetric {
    unsigned id;
    int result;
    double value;
    const char* info[3];
};

struct GpmMetrics {
    unsigned version;
    unsigned count;
    void* samples[2];
    GpmMetric metrics[1];  // as many as `count` says
};

API int nvmlGpmMetricsGet(GpmMetrics* asked) {
    if (asked->version != GPM_VERSION) return WRONG_VERSION;
    for (unsigned i = 0; i < asked->count; i++) {
        asked->metrics[i].result = 0;
        asked->metrics[i].value = 50 + asked->metrics[i].id;
    }
    return 0;
}
