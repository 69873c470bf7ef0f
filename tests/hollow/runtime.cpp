// The CUDA runtime and a little of the driver, for a machine without a GPU.
//
// "Device" memory is host memory. A stream is a queue with a thread of its own, so that copies, events, waits and
// collectives really run later than the call that queues them. Kernels do nothing here: operators.cpp runs the
// operators of torch on the CPU, in the order of the stream. Every call is counted.
//
// The README tells what the environment variables HOLLOW_* mean.
#include "runtime.h"

#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <sstream>
#include <thread>

constexpr size_t DEVICE_BYTES = 4ull << 30;
constexpr int N_PROCESSORS = 132;
constexpr int MAX_THREADS = 1024;

State& state() {
    static State* only = new State;  // never destroyed, as threads of streams outlive main
    return *only;
}

thread_local int current_device = 0;
static thread_local cudaError_t last_error = cudaSuccess;

static cudaError_t fail(cudaError_t error) {
    last_error = error;
    return error;
}

int setting(const char* name, int fallback) {
    const char* value = getenv(name);
    return value && *value ? atoi(value) : fallback;
}

static double now_us() {
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// ---------------------------------------------------------------------------------------------- report

void count(const std::string& call) {
    state().counts[call]++;
}

void note(const std::string& text) {
    if (state().notes.insert(text).second) fprintf(stderr, "[hollow] %s\n", text.c_str());
}

// The counts of all calls so far, as lines "count <call>\t<number>".
static std::string counts_text() {
    std::ostringstream text;
    for (auto& [call, number] : state().counts) {
        text << "count " << call << "\t" << number << "\n";
    }
    return text.str();
}

API const char* hollow_counts() {
    static thread_local std::string text;
    std::lock_guard lock(state().mutex);
    text = counts_text();
    return text.c_str();
}

// What replaces an entry point of CUDA or NCCL that torch imports, but that should not be needed.
API int hollow_stub(const char* name) {
    std::lock_guard lock(state().mutex);
    note(std::string("not implemented: ") + name);
    return 0;
}

// At the end of a process, $HOLLOW_REPORT.<process id> gets the contexts, the counts and the notes.
__attribute__((destructor)) static void write_report() {
    const char* prefix = getenv("HOLLOW_REPORT");
    if (!prefix || state().counts.empty()) return;
    FILE* file = fopen((std::string(prefix) + "." + std::to_string(getpid())).c_str(), "w");
    if (!file) return;
    for (int device : state().contexts) {
        fprintf(file, "context %d\n", device);
    }
    fputs(counts_text().c_str(), file);
    for (auto& text : state().notes) {
        fprintf(file, "note %s\n", text.c_str());
    }
    fclose(file);
}

// ---------------------------------------------------------------------------------------------- streams

Stream* stream_of(cudaStream_t handle) {
    if (handle && handle != cudaStreamLegacy && handle != cudaStreamPerThread) return (Stream*)handle;
    Stream*& stream = state().default_streams[current_device];
    if (!stream) {
        stream = new Stream;
        stream->id = state().n_streams++;
        stream->device = current_device;
        state().streams.insert(stream);
    }
    return stream;
}

// The thread of a stream.
static void work(Stream* stream) {
    pthread_setname_np(pthread_self(), "hollow stream");
    State& all = state();
    std::unique_lock lock(all.mutex);
    while (true) {
        all.changed.wait(lock, [&] { return stream->queue.empty() ? stream->is_destroyed : !stream->has_operator; });
        if (stream->queue.empty()) {
            all.streams.erase(stream);
            return;
        }
        Task task = std::move(stream->queue.front());
        stream->queue.pop_front();
        stream->is_busy = true;
        lock.unlock();
        if (task.delay_us) usleep(task.delay_us);
        task.run();
        lock.lock();
        stream->is_busy = false;
        all.changed.notify_all();
    }
}

void enqueue(Stream* stream, std::function<void()> run, int delay_us) {
    if (!stream->has_worker) {
        stream->has_worker = true;
        std::thread(work, stream).detach();
    }
    stream->queue.push_back({std::move(run), delay_us});
    state().changed.notify_all();
}

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned, int priority) {
    std::lock_guard lock(state().mutex);
    count("cudaStreamCreate");
    use_device();
    auto* stream = new Stream;
    stream->id = state().n_streams++;
    stream->device = current_device;
    stream->priority = priority;
    state().streams.insert(stream);
    *out = (cudaStream_t)stream;
    return cudaSuccess;
}

API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) {
    return cudaStreamCreateWithPriority(out, flags, 0);
}

API cudaError_t cudaStreamDestroy(cudaStream_t handle) {
    std::lock_guard lock(state().mutex);
    ((Stream*)handle)->is_destroyed = true;
    state().changed.notify_all();
    return cudaSuccess;
}

API cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
    std::lock_guard lock(state().mutex);
    *priority = stream_of(handle)->priority;
    return cudaSuccess;
}

API cudaError_t cudaStreamGetDevice(cudaStream_t handle, int* device) {
    std::lock_guard lock(state().mutex);
    *device = stream_of(handle)->device;
    return cudaSuccess;
}

API cudaError_t cudaStreamGetId(cudaStream_t handle, unsigned long long* id) {
    std::lock_guard lock(state().mutex);
    *id = stream_of(handle)->id;
    return cudaSuccess;
}

API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long*,
                                         cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
    return cudaSuccess;
}

API cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    std::unique_lock lock(state().mutex);
    count("cudaStreamSynchronize");
    use_device();
    Stream* stream = stream_of(handle);
    state().changed.wait(lock, [&] { return stream->is_idle(); });
    merge(state().host_clock, stream->clock);
    return cudaSuccess;
}

API cudaError_t cudaStreamQuery(cudaStream_t handle) {
    std::lock_guard lock(state().mutex);
    Stream* stream = stream_of(handle);
    if (!stream->is_idle()) return cudaErrorNotReady;
    merge(state().host_clock, stream->clock);
    return cudaSuccess;
}

API cudaError_t cudaDeviceSynchronize() {
    std::unique_lock lock(state().mutex);
    count("cudaDeviceSynchronize");
    use_device();
    auto is_ours = [device = current_device](const Stream* each) {
        return each->device == device;
    };
    state().changed.wait(lock, [&] {
        for (Stream* each : state().streams) {
            if (is_ours(each) && !each->is_idle()) return false;
        }
        return true;
    });
    for (Stream* each : state().streams) {
        if (is_ours(each)) merge(state().host_clock, each->clock);
    }
    return cudaSuccess;
}

API cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
    std::lock_guard lock(state().mutex);
    enqueue(stream_of(handle), [=] { function(data); });
    return cudaSuccess;
}

// ---------------------------------------------------------------------------------------------- events

// An event may be recorded again, or destroyed, while a stream has still to reach or to wait for an earlier record of
// it. So records are numbered, and the streams share this.
struct EventState {
    bool has_timing = true;
    uint64_t n_recorded = 0;
    uint64_t n_reached = 0;
    double reached_us = 0;
    VectorClock clock{};

    bool is_reached() const {
        return n_reached >= n_recorded;
    }
};

using Event = std::shared_ptr<EventState>;  // cudaEvent_t is a pointer to one

static Event& event_of(cudaEvent_t handle) {
    return *(Event*)handle;
}

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags) {
    std::lock_guard lock(state().mutex);
    count("cudaEventCreate");
    use_device();
    auto* event = new Event(std::make_shared<EventState>());
    (*event)->has_timing = !(flags & cudaEventDisableTiming);
    *out = (cudaEvent_t)event;
    return cudaSuccess;
}

API cudaError_t cudaEventCreate(cudaEvent_t* out) {
    return cudaEventCreateWithFlags(out, 0);
}

API cudaError_t cudaEventDestroy(cudaEvent_t handle) {
    std::lock_guard lock(state().mutex);
    delete (Event*)handle;
    return cudaSuccess;
}

API cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream_handle, unsigned) {
    std::lock_guard lock(state().mutex);
    count("cudaEventRecord");
    use_device();
    Stream* stream = stream_of(stream_handle);
    Event event = event_of(handle);
    tick(stream);
    event->clock = stream->clock;
    const uint64_t number = ++event->n_recorded;
    auto reach = [=] {
        event->n_reached = std::max(event->n_reached, number);
        event->reached_us = now_us();
        state().changed.notify_all();
    };
    if (stream->is_idle() && !stream->has_operator) {
        reach();
    } else {
        enqueue(stream, [=] {
            std::lock_guard lock(state().mutex);
            reach();
        });
    }
    return cudaSuccess;
}

API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return cudaEventRecordWithFlags(event, stream, 0);
}

API cudaError_t cudaStreamWaitEvent(cudaStream_t stream_handle, cudaEvent_t handle, unsigned) {
    std::lock_guard lock(state().mutex);
    count("cudaStreamWaitEvent");
    use_device();
    Stream* stream = stream_of(stream_handle);
    Event event = event_of(handle);
    merge(stream->clock, event->clock);
    if (event->is_reached()) return cudaSuccess;
    enqueue(stream, [event, number = event->n_recorded] {
        std::unique_lock lock(state().mutex);
        state().changed.wait(lock, [&] { return event->n_reached >= number; });
    });
    return cudaSuccess;
}

API cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    std::unique_lock lock(state().mutex);
    count("cudaEventSynchronize");
    Event event = event_of(handle);
    state().changed.wait(lock, [&] { return event->is_reached(); });
    merge(state().host_clock, event->clock);
    return cudaSuccess;
}

API cudaError_t cudaEventQuery(cudaEvent_t handle) {
    std::lock_guard lock(state().mutex);
    Event event = event_of(handle);
    if (!event->is_reached()) return cudaErrorNotReady;
    merge(state().host_clock, event->clock);
    return cudaSuccess;
}

API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin_handle, cudaEvent_t end_handle) {
    std::lock_guard lock(state().mutex);
    Event begin = event_of(begin_handle);
    Event end = event_of(end_handle);
    for (auto& each : {begin, end}) {
        if (!each->has_timing || !each->n_recorded) return fail(cudaErrorInvalidResourceHandle);
        if (!each->is_reached()) return fail(cudaErrorNotReady);
    }
    *ms = (float)((end->reached_us - begin->reached_us) / 1000);
    return cudaSuccess;
}

API cudaError_t cudaEventElapsedTime_v2(float* ms, cudaEvent_t begin, cudaEvent_t end) {
    return cudaEventElapsedTime(ms, begin, end);
}

// ---------------------------------------------------------------------------------------------- memory

// The block that an address is in, or the end.
template <class Blocks, class Size>
static auto block_of(const Blocks& blocks, const void* memory, Size size_of) {
    auto block = blocks.upper_bound((const char*)memory);
    if (block == blocks.begin()) return blocks.end();
    --block;
    return (const char*)memory < block->first + size_of(block->second) ? block : blocks.end();
}

static auto device_block(const void* memory) {
    return block_of(state().device_memory, memory, [](auto& block) { return block.first; });
}

static bool is_on_device(const void* memory) {
    return device_block(memory) != state().device_memory.end();
}

static bool is_pinned(const void* memory) {
    auto block = block_of(state().pinned_memory, memory, [](size_t size) { return size; });
    return block != state().pinned_memory.end();
}

// New memory is full of NaN, or -1, so that a read of memory that was never written shows.
static bool allocate(void** out, size_t n_bytes) {
    if (posix_memalign(out, 4096, std::max<size_t>(n_bytes, 1))) return false;
    memset(*out, 0xff, n_bytes);
    return true;
}

API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    std::lock_guard lock(state().mutex);
    use_device();
    *total = DEVICE_BYTES;
    *free = *total - state().used_bytes[current_device];
    return cudaSuccess;
}

API cudaError_t cudaMalloc(void** out, size_t n_bytes) {
    std::lock_guard lock(state().mutex);
    count("cudaMalloc");
    use_device();
    size_t& used = state().used_bytes[current_device];
    if (used + n_bytes > DEVICE_BYTES || !allocate(out, n_bytes)) return fail(cudaErrorMemoryAllocation);
    used += n_bytes;
    state().device_memory[(const char*)*out] = {n_bytes, current_device};
    return cudaSuccess;
}

API cudaError_t cudaFree(void* memory) {
    if (!memory) return cudaSuccess;
    std::unique_lock lock(state().mutex);
    count("cudaFree");
    state().changed.wait(lock, [] {  // it waits for all devices
        for (Stream* each : state().streams) {
            if (!each->is_idle()) return false;
        }
        return true;
    });
    auto block = state().device_memory.find((const char*)memory);
    if (block == state().device_memory.end()) return fail(cudaErrorInvalidValue);
    auto [n_bytes, device] = block->second;
    forget(block->first, block->first + n_bytes);
    state().used_bytes[device] -= n_bytes;
    state().device_memory.erase(block);
    free(memory);
    return cudaSuccess;
}

API cudaError_t cudaHostAlloc(void** out, size_t n_bytes, unsigned) {
    std::lock_guard lock(state().mutex);
    count("cudaHostAlloc");
    use_device();
    if (!allocate(out, n_bytes)) return fail(cudaErrorMemoryAllocation);
    state().pinned_memory[(const char*)*out] = n_bytes;
    return cudaSuccess;
}

API cudaError_t cudaFreeHost(void* memory) {
    std::lock_guard lock(state().mutex);
    count("cudaFreeHost");
    state().pinned_memory.erase((const char*)memory);
    free(memory);
    return cudaSuccess;
}

API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* memory) {
    std::lock_guard lock(state().mutex);
    *out = {};
    out->type = cudaMemoryTypeUnregistered;
    out->device = current_device;
    if (is_on_device(memory)) {
        out->type = cudaMemoryTypeDevice;
        out->device = device_block(memory)->second.second;
        out->devicePointer = (void*)memory;
    } else if (is_pinned(memory)) {
        out->type = cudaMemoryTypeHost;
        out->devicePointer = out->hostPointer = (void*)memory;
    }
    return cudaSuccess;
}

// FNV-1a, by words.
static uint64_t digest(const void* memory, size_t n_bytes) {
    uint64_t hash = 1469598103934665603ull;
    const size_t n_words = n_bytes / 8;
    for (size_t i = 0; i < n_words; i++) {
        hash = (hash ^ ((const uint64_t*)memory)[i]) * 1099511628211ull;
    }
    for (size_t i = 8 * n_words; i < n_bytes; i++) {
        hash = (hash ^ ((const uint8_t*)memory)[i]) * 1099511628211ull;
    }
    return hash;
}

// A copy to or from pageable memory makes the host wait, as in CUDA. Other copies take HOLLOW_COPY_US.
static cudaError_t copy(void* to, const void* from, size_t n_bytes, cudaStream_t handle, bool is_blocking) {
    if (!n_bytes) return cudaSuccess;
    std::unique_lock lock(state().mutex);
    use_device();
    const bool to_device = is_on_device(to);
    const bool from_device = is_on_device(from);
    const bool is_pageable = !(to_device || is_pinned(to)) || !(from_device || is_pinned(from));
    const bool is_waited_for = is_blocking || is_pageable;
    const std::string kind = std::string(from_device ? "D" : "H") + "2" + (to_device ? "D" : "H");
    count("copy " + kind + (is_pageable ? ", pageable" : "") + (is_waited_for ? ", host waits" : ""));

    Stream* stream = stream_of(handle);
    const std::string by = "copy " + kind + " of " + std::to_string(n_bytes) + " bytes";
    tick(stream);
    if (from_device) check_access(stream, from, n_bytes, false, by);
    if (to_device) check_access(stream, to, n_bytes, true, by, !from_device);

    // The detector follows memory of the device. Whether the host leaves the source of a copy alone is seen by its
    // bytes.
    const bool is_compared = !from_device && !is_waited_for;
    const uint64_t before = is_compared ? digest(from, n_bytes) : 0;
    auto run = [=] {
        if (is_compared && digest(from, n_bytes) != before) {
            std::lock_guard lock(state().mutex);
            note("race, overwritten: the host changed the source of a " + by + " before it ended");
        }
        memcpy(to, from, n_bytes);
    };
    enqueue(stream, run, is_waited_for ? 0 : setting("HOLLOW_COPY_US", 0));
    if (is_waited_for) {
        state().changed.wait(lock, [&] { return stream->is_idle(); });
        merge(state().host_clock, stream->clock);
    }
    return cudaSuccess;
}

API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n_bytes, cudaMemcpyKind, cudaStream_t stream) {
    return copy(to, from, n_bytes, stream, false);
}

API cudaError_t cudaMemcpy(void* to, const void* from, size_t n_bytes, cudaMemcpyKind) {
    return copy(to, from, n_bytes, nullptr, true);
}

API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t n_bytes, cudaStream_t stream) {
    return copy(to, from, n_bytes, stream, false);
}

API cudaError_t cudaMemsetAsync(void* memory, int value, size_t n_bytes, cudaStream_t handle) {
    std::lock_guard lock(state().mutex);
    count("cudaMemsetAsync");
    use_device();
    Stream* stream = stream_of(handle);
    tick(stream);
    check_access(stream, memory, n_bytes, true, "memset");
    enqueue(stream, [=] { memset(memory, value, n_bytes); });
    return cudaSuccess;
}

// ---------------------------------------------------------------------------------------------- devices

const std::vector<int>& visible_devices() {
    static const std::vector<int> visible = [] {
        const int n_devices = setting("HOLLOW_DEVICES", 1);
        std::vector<int> numbers;
        if (const char* text = getenv("CUDA_VISIBLE_DEVICES")) {
            std::istringstream words(text);
            for (std::string word; std::getline(words, word, ',');) {
                const int number = word.empty() ? -1 : atoi(word.c_str());
                if (number < 0 || number >= n_devices) break;  // as CUDA does, which ignores what follows
                numbers.push_back(number);
            }
        } else {
            for (int number = 0; number < n_devices; number++) {
                numbers.push_back(number);
            }
        }
        return numbers;
    }();
    return visible;
}

static int n_visible() {
    return (int)visible_devices().size();
}

void use_device() {
    if (current_device < n_visible()) state().contexts.insert(visible_devices()[current_device]);
}

// The CUDA build of torch has been loaded when it first asks for devices: now its operators can be replaced.
static void replace_operators() {
    Dl_info self;
    dladdr((void*)&replace_operators, &self);
    const std::string path = self.dli_fname;
    const std::string library = path.substr(0, path.rfind('/')) + "/operators.so";
    void* handle = dlopen(library.c_str(), RTLD_NOW);
    auto* install = handle ? (void (*)())dlsym(handle, "hollow_install") : nullptr;
    if (!install) {
        fprintf(stderr, "[hollow] %s\n", dlerror());
        abort();
    }
    install();
}

API cudaError_t cudaGetDeviceCount(int* n_devices) {
    static std::once_flag once;
    std::call_once(once, replace_operators);
    *n_devices = n_visible();
    return n_visible() ? cudaSuccess : fail(cudaErrorNoDevice);
}

API cudaError_t cudaGetDevice(int* device) {
    *device = current_device;
    return cudaSuccess;
}

API cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= n_visible()) return fail(cudaErrorInvalidDevice);
    std::lock_guard lock(state().mutex);
    current_device = device;
    use_device();
    return cudaSuccess;
}

API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* out, int device) {
    if (device < 0 || device >= n_visible()) return fail(cudaErrorInvalidDevice);
    const int physical = visible_devices()[device];
    const int capability = setting("HOLLOW_CAPABILITY", 90);
    *out = {};
    snprintf(out->name, sizeof out->name, "hollow GPU %d", physical);
    out->uuid.bytes[15] = (char)physical;  // nvml.cpp has the same
    out->pciBusID = physical + 1;
    out->totalGlobalMem = DEVICE_BYTES;
    out->major = capability / 10;
    out->minor = capability % 10;
    out->multiProcessorCount = N_PROCESSORS;
    out->warpSize = 32;
    out->maxThreadsPerBlock = MAX_THREADS;
    out->maxThreadsPerMultiProcessor = 2 * MAX_THREADS;
    out->sharedMemPerBlock = out->sharedMemPerBlockOptin = 48 << 10;
    out->regsPerBlock = out->regsPerMultiprocessor = 65536;
    out->l2CacheSize = 50 << 20;
    for (int axis = 0; axis < 3; axis++) {
        out->maxThreadsDim[axis] = axis < 2 ? MAX_THREADS : 64;
        out->maxGridSize[axis] = axis ? 65535 : 2147483647;
    }
    out->unifiedAddressing = out->canMapHostMemory = out->concurrentKernels = 1;
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetAttribute(int* out, cudaDeviceAttr attribute, int) {
    const int capability = setting("HOLLOW_CAPABILITY", 90);
    const std::map<int, int> known = {
        {cudaDevAttrComputeCapabilityMajor, capability / 10},
        {cudaDevAttrComputeCapabilityMinor, capability % 10},
        {cudaDevAttrMultiProcessorCount, N_PROCESSORS},
        {cudaDevAttrMaxThreadsPerBlock, MAX_THREADS},
        {cudaDevAttrWarpSize, 32},
        {cudaDevAttrUnifiedAddressing, 1},
    };
    auto found = known.find(attribute);
    *out = found == known.end() ? 0 : found->second;
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetPCIBusId(char* out, int size, int device) {
    snprintf(out, size, "0000:%02x:00.0", visible_devices()[device] + 1);
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
    *can = 0;
    return cudaSuccess;
}

API cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

API cudaError_t cudaDriverGetVersion(int* version) {
    return cudaRuntimeGetVersion(version);
}

API cudaError_t cudaGetLastError() {
    return std::exchange(last_error, cudaSuccess);
}

API cudaError_t cudaPeekAtLastError() {
    return last_error;
}

API const char* cudaGetErrorString(cudaError_t error) {
    if (error == cudaErrorMemoryAllocation) return "out of memory";
    if (error == cudaErrorNoDevice) return "no CUDA-capable device is detected";
    return "an error of the stand-in";
}

API const char* cudaGetErrorName(cudaError_t) {
    return "cudaErrorHollow";
}

// ---------------------------------------------------------------------------------------------- kernels

// A kernel that is launched here was not replaced by an operator on the CPU, so nothing computes its result.
API cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t) {
    std::lock_guard lock(state().mutex);
    auto found = state().kernels.find(function);
    note("not computed: kernel " + (found == state().kernels.end() ? "without a name" : found->second.substr(0, 200)));
    return cudaSuccess;
}

API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* function, void**) {
    return cudaLaunchKernel(function, {}, {}, nullptr, 0, nullptr);
}

API cudaError_t __cudaLaunchKernel(void* function, dim3, dim3, void**, size_t, cudaStream_t) {
    return cudaLaunchKernel(function, {}, {}, nullptr, 0, nullptr);
}

API cudaError_t __cudaGetKernel(void** out, const void* function) {
    *out = (void*)function;
    return cudaSuccess;
}

API void** __cudaRegisterFatBinary(void*) {
    static void* handle[4];
    return handle;
}

API void __cudaRegisterFatBinaryEnd(void**) {}

API void __cudaUnregisterFatBinary(void**) {}

API void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, void*, void*, void*, void*,
                                int*) {
    state().kernels[function] = name;
}

API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

API char __cudaInitModule(void**) {
    return 1;
}

API unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void*) {
    return 0;
}

API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* n_shared, void* stream) {
    *grid = *block = dim3(1);
    *n_shared = 0;
    *(void**)stream = nullptr;
    return cudaSuccess;
}

API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* out, const void*) {
    *out = {};
    out->maxThreadsPerBlock = MAX_THREADS;
    out->binaryVersion = out->ptxVersion = 90;
    return cudaSuccess;
}

API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
    return cudaSuccess;
}

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n_blocks, const void*, int, size_t,
                                                                       unsigned) {
    *n_blocks = 2;
    return cudaSuccess;
}

// operators.cpp calls these two around the CPU's code of an operator. The operator runs in the thread that launches it,
// when its stream has come so far. An operator may call others: they belong to it.
struct HollowRange {
    const void* begin;
    size_t n_bytes;
    bool is_write;
};

static thread_local int n_nested = 0;

API void* hollow_launch_begin(void* handle, const char* name, const HollowRange* ranges, int n_ranges) {
    if (n_nested++) return nullptr;
    std::unique_lock lock(state().mutex);
    count("operator");
    use_device();
    Stream* stream = stream_of((cudaStream_t)handle);
    merge(stream->clock, state().host_clock);
    state().changed.wait(lock, [&] { return stream->is_idle() && !stream->has_operator; });
    stream->has_operator = true;
    tick(stream);
    for (int i = 0; i < n_ranges; i++) {
        check_access(stream, ranges[i].begin, ranges[i].n_bytes, ranges[i].is_write, name);
    }
    return stream;
}

API void hollow_launch_end(void* stream) {
    if (--n_nested) return;
    std::lock_guard lock(state().mutex);
    ((Stream*)stream)->has_operator = false;
    state().changed.notify_all();
}

// ---------------------------------------------------------------------------------------------- driver

static int return_success() {
    return 0;
}

// Functions of the driver that torch asks for by name.
API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** out, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* result) {
    void* function = dlsym(RTLD_DEFAULT, name);
    *out = function ? function : (void*)return_success;
    if (result) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

API int cuInit(unsigned) {
    return 0;
}

API int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* is_active) {
    std::lock_guard lock(state().mutex);
    if (flags) *flags = 0;
    *is_active = device < n_visible() && state().contexts.count(visible_devices()[device]);
    return 0;
}

API int cuGetErrorString(int, const char** text) {
    *text = "an error of the stand-in";
    return 0;
}

API int cuCtxGetCurrent(void** out) {
    static int context;
    *out = &context;
    return 0;
}
