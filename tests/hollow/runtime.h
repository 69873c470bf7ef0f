// What the parts of the stand-in share: streams with their queues, the memory of the "devices", and the report.
//
// All state is in one struct with one lock. A function whose comment says "with the lock" expects that its caller holds
// `state().mutex`.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

constexpr int MAX_STREAMS = 400;  // torch creates 128 streams of a priority at once

// A vector clock: for each stream, how many of its operations are known to have ended. Place 0 stands for the host, all
// of its threads together.
using VectorClock = std::array<uint32_t, MAX_STREAMS>;

struct Task {
    std::function<void()> run;
    int delay_us = 0;
};

struct Stream {
    int id = 0;
    int device = 0;
    int priority = 0;
    std::deque<Task> queue;
    bool has_worker = false;
    bool is_busy = false;       // its worker runs a task
    bool has_operator = false;  // a thread of torch runs an operator in the order of this stream
    bool is_destroyed = false;
    VectorClock clock{};

    bool is_idle() const {
        return queue.empty() && !is_busy;
    }
};

// A stretch of device memory that a copy from the host has filled, with its last write and the reads since then.
struct Buffer {
    struct Access {
        uint32_t time;
        std::string by;
    };
    const char* begin;
    const char* end;
    int writer;
    Access write;
    std::map<int, Access> reads;  // by stream
};

struct State {
    std::mutex mutex;
    std::condition_variable changed;

    VectorClock host_clock{};
    int n_streams = 1;
    std::map<int, Stream*> default_streams;  // by device
    std::set<Stream*> streams;
    std::deque<Buffer> buffers;

    std::map<const char*, std::pair<size_t, int>> device_memory;  // begin: size and device
    std::map<const char*, size_t> pinned_memory;                  // begin: size
    std::map<int, size_t> used_bytes;                             // by device
    std::map<const void*, std::string> kernels;                   // names, by the address of the host's function

    // For the report.
    std::set<int> contexts;  // physical devices on which this process has done anything
    std::map<std::string, long> counts;
    std::set<std::string> notes;
};

State& state();

// The device of this thread, as cudaSetDevice has set it.
extern thread_local int current_device;

// The number in an environment variable.
int setting(const char* name, int fallback);

// The physical numbers of the devices that CUDA_VISIBLE_DEVICES leaves.
const std::vector<int>& visible_devices();

// Count a call of the runtime. With the lock.
void count(const std::string& call);

// Remember that the current device has been used, so that a driver would have made a context on it. With the lock.
void use_device();

// Print a fault once, and keep it for the report. With the lock.
void note(const std::string& text);

Stream* stream_of(cudaStream_t handle);                                     // with the lock
void enqueue(Stream* stream, std::function<void()> run, int delay_us = 0);  // with the lock

// ---------------------------------------------------------------------------------------------- races.cpp

// Learn what another clock knows.
void merge(VectorClock& into, const VectorClock& from);

// Begin an operation of a stream. With the lock.
void tick(Stream* stream);

// Note a race if no event orders this access after earlier ones of other streams. With the lock.
// is_new_buffer: follow this memory from now on.
void check_access(Stream* stream, const void* begin, size_t n_bytes, bool is_write, const std::string& by,
                  bool is_new_buffer = false);

// Stop following memory. With the lock.
void forget(const char* begin, const char* end);
