// The collectives of NCCL between the processes of one machine, in shared memory.
//
// A communicator has a stretch of memory for each rank. In a collective, each rank writes a chunk of its data there,
// waits for the others, reads what it needs, and waits again. All of this runs in the thread of the stream.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#include "runtime.h"

constexpr size_t CHUNK = 1 << 20;
constexpr int VERSION = 22907;  // 2.29.7
constexpr int SYSTEM_ERROR = 2;
constexpr int INVALID_USAGE = 5;

// ncclDataType_t and ncclRedOp_t
enum Type { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16 };
enum Operation { SUM, PRODUCT, MAXIMUM, MINIMUM, MEAN };

constexpr size_t BYTES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};  // of a value of each type

struct Id {
    char name[128];
};

// What a rank calls, to compare with the others.
struct Call {
    char text[120];
};

struct Shared {
    std::atomic<uint64_t> n_arrived;
};

constexpr size_t HEADER_BYTES = 4096;  // Shared, then a Call for each rank
constexpr int MAX_RANKS = (HEADER_BYTES - sizeof(Call)) / sizeof(Call);

struct Communicator {
    int rank;
    int n_ranks;
    int device;
    char* memory;
    uint64_t n_barriers = 0;
    std::atomic<bool> is_aborted{false};

    Shared& shared() const {
        return *(Shared*)memory;
    }
    Call& call_of(int each) const {
        return ((Call*)memory)[1 + each];
    }
    char* data_of(int each) const {
        return memory + HEADER_BYTES + each * CHUNK;
    }
};

// False if the communicator was aborted, as torch does when a rank has not come within the timeout.
static bool wait_for_all(Communicator* group) {
    const uint64_t target = group->n_ranks * ++group->n_barriers;
    group->shared().n_arrived++;
    for (int n_looks = 0; group->shared().n_arrived < target; n_looks++) {
        if (group->is_aborted) return false;
        usleep(n_looks < 1000 ? 20 : 1000);
    }
    return true;
}

// NCCL would hang, or give wrong numbers, if ranks call different collectives. Here the process ends with a message.
static bool has_same_call(Communicator* group, const Call& own) {
    group->call_of(group->rank) = own;
    if (!wait_for_all(group)) return false;
    for (int rank = 0; rank < group->n_ranks; rank++) {
        const Call& other = group->call_of(rank);
        if (!strcmp(other.text, own.text)) continue;
        fprintf(stderr, "[hollow] rank %d calls %s, but rank %d calls %s\n", group->rank, own.text, rank, other.text);
        abort();
    }
    return wait_for_all(group);
}

template <class T>
static void combine(Communicator* group, char* out, size_t n_bytes, int operation) {
    for (size_t i = 0; i < n_bytes / sizeof(T); i++) {
        T result = ((T*)group->data_of(0))[i];
        for (int rank = 1; rank < group->n_ranks; rank++) {
            const T value = ((T*)group->data_of(rank))[i];
            if (operation == MAXIMUM) {
                result = std::max(result, value);
            } else if (operation == MINIMUM) {
                result = std::min(result, value);
            } else {
                result += value;
            }
        }
        ((T*)out)[i] = result;
    }
}

// The types and operations that this project uses.
static bool combine_as(int type, Communicator* group, char* out, size_t n_bytes, int operation) {
    if (operation == PRODUCT || operation == MEAN) return false;
    switch (type) {
        case INT32:
            combine<int32_t>(group, out, n_bytes, operation);
            return true;
        case INT64:
            combine<int64_t>(group, out, n_bytes, operation);
            return true;
        case FLOAT32:
            combine<float>(group, out, n_bytes, operation);
            return true;
        case FLOAT64:
            combine<double>(group, out, n_bytes, operation);
            return true;
        default:
            return false;
    }
}

// Queue a collective. run: called for each chunk with its place and size, between two waits for all ranks.
static int collective(Communicator* group, const Call& call, const void* send, size_t n_send, void* receive,
                      size_t n_receive, size_t n_bytes, cudaStream_t handle, bool is_sender,
                      std::function<void(size_t, size_t)> run) {
    std::lock_guard lock(state().mutex);
    count(std::string(call.text, strcspn(call.text, " ")));
    use_device();
    Stream* stream = stream_of(handle);
    tick(stream);
    if (is_sender) check_access(stream, send, n_send, false, call.text);
    check_access(stream, receive, n_receive, true, call.text);
    auto task = [=] {
        if (!has_same_call(group, call)) return;
        for (size_t at = 0; at < n_bytes; at += CHUNK) {
            const size_t n = std::min(CHUNK, n_bytes - at);
            if (is_sender) memcpy(group->data_of(group->rank), (const char*)send + at, n);
            if (!wait_for_all(group)) return;
            run(at, n);
            if (!wait_for_all(group)) return;
        }
    };
    enqueue(stream, task, setting("HOLLOW_NCCL_US", 0));
    return 0;
}

static Call describe(const char* name, size_t count, int type, int detail) {
    Call call{};
    snprintf(call.text, sizeof call.text, "%s of %zu values (type %d, operation or root %d)", name, count, type,
             detail);
    return call;
}

static int reduce(const char* name, const void* send, void* receive, size_t count, int type, int operation,
                  bool has_result, Communicator* group, cudaStream_t stream) {
    const size_t n_bytes = count * BYTES[type];
    auto run = [=](size_t at, size_t n) {
        if (!has_result || combine_as(type, group, (char*)receive + at, n, operation)) return;
        std::lock_guard lock(state().mutex);
        note("not implemented: a reduction of type " + std::to_string(type) + " by " + std::to_string(operation));
    };
    return collective(group, describe(name, count, type, operation), send, n_bytes, receive, has_result ? n_bytes : 0,
                      n_bytes, stream, true, run);
}

API int ncclAllReduce(const void* send, void* receive, size_t count, int type, int operation, Communicator* group,
                      cudaStream_t stream) {
    return reduce("ncclAllReduce", send, receive, count, type, operation, true, group, stream);
}

API int ncclReduce(const void* send, void* receive, size_t count, int type, int operation, int root,
                   Communicator* group, cudaStream_t stream) {
    return reduce("ncclReduce", send, receive, count, type, operation, group->rank == root, group, stream);
}

API int ncclBroadcast(const void* send, void* receive, size_t count, int type, int root, Communicator* group,
                      cudaStream_t stream) {
    const size_t n_bytes = count * BYTES[type];
    const bool is_root = group->rank == root;
    auto run = [=](size_t at, size_t n) {
        if (!is_root || send != receive) memcpy((char*)receive + at, group->data_of(root), n);
    };
    return collective(group, describe("ncclBroadcast", count, type, root), send, n_bytes, receive, n_bytes, n_bytes,
                      stream, is_root, run);
}

API int ncclBcast(void* memory, size_t count, int type, int root, Communicator* group, cudaStream_t stream) {
    return ncclBroadcast(memory, memory, count, type, root, group, stream);
}

API int ncclAllGather(const void* send, void* receive, size_t count, int type, Communicator* group,
                      cudaStream_t stream) {
    const size_t n_bytes = count * BYTES[type];
    auto run = [=](size_t at, size_t n) {
        for (int rank = 0; rank < group->n_ranks; rank++) {
            memcpy((char*)receive + rank * n_bytes + at, group->data_of(rank), n);
        }
    };
    return collective(group, describe("ncclAllGather", count, type, 0), send, n_bytes, receive,
                      n_bytes * group->n_ranks, n_bytes, stream, true, run);
}

// ---------------------------------------------------------------------------------------------- communicators

API int ncclGetVersion(int* version) {
    *version = VERSION;
    return 0;
}

API const char* ncclGetErrorString(int) {
    return "an error of the stand-in";
}

static std::string last_error;

API const char* ncclGetLastError(void*) {
    return last_error.c_str();
}

API int ncclGetUniqueId(Id* id) {
    *id = {};
    snprintf(id->name, sizeof id->name, "/hollow-%d-%08x", getpid(), std::random_device()());
    return 0;
}

// The communicator of a rank, on the current device. nullptr if there is no shared memory for it.
static Communicator* open_communicator(int n_ranks, const Id& id, int rank) {
    const size_t size = HEADER_BYTES + n_ranks * CHUNK;
    const int file = shm_open(id.name, O_CREAT | O_RDWR, 0600);
    if (n_ranks > MAX_RANKS || file < 0 || ftruncate(file, size)) return nullptr;
    void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    std::lock_guard lock(state().mutex);
    count("ncclCommInit");
    use_device();
    return new Communicator{rank, n_ranks, current_device, (char*)memory};
}

API int ncclCommInitRankConfig(Communicator** out, int n_ranks, Id id, int rank, void*) {
    Communicator* group = open_communicator(n_ranks, id, rank);
    if (!group) return SYSTEM_ERROR;
    Call& own = group->call_of(rank);
    snprintf(own.text, sizeof own.text, "GPU %d", visible_devices()[current_device]);
    if (!wait_for_all(group)) return SYSTEM_ERROR;
    if (rank == 0) shm_unlink(id.name);
    for (int other = 0; other < n_ranks; other++) {
        if (other == rank || strcmp(group->call_of(other).text, own.text)) continue;
        last_error = "Duplicate GPU detected : rank " + std::to_string(rank) + " and rank " + std::to_string(other) +
                     " both on " + own.text;
        return INVALID_USAGE;
    }
    if (!wait_for_all(group)) return SYSTEM_ERROR;  // before the next call
    *out = group;
    return 0;
}

API int ncclCommInitRank(Communicator** out, int n_ranks, Id id, int rank) {
    return ncclCommInitRankConfig(out, n_ranks, id, rank, nullptr);
}

// Ranks that are devices of this process, as nn.DataParallel has them.
API int ncclCommInitAll(Communicator** out, int n_ranks, const int* devices) {
    Id id;
    ncclGetUniqueId(&id);
    const int before = current_device;
    for (int rank = 0; rank < n_ranks; rank++) {
        current_device = devices ? devices[rank] : rank;
        out[rank] = open_communicator(n_ranks, id, rank);
        if (!out[rank]) return SYSTEM_ERROR;
    }
    current_device = before;
    shm_unlink(id.name);
    return 0;
}

API int ncclCommFinalize(Communicator*) {
    return 0;
}

API int ncclCommDestroy(Communicator*) {
    std::lock_guard lock(state().mutex);
    count("ncclCommDestroy");
    return 0;
}

API int ncclCommAbort(Communicator* group) {
    std::lock_guard lock(state().mutex);
    count("ncclCommAbort");
    group->is_aborted = true;
    return 0;
}

API int ncclCommGetAsyncError(Communicator*, int* error) {
    *error = 0;
    return 0;
}

API int ncclCommCount(const Communicator* group, int* n_ranks) {
    *n_ranks = group->n_ranks;
    return 0;
}

API int ncclCommCuDevice(const Communicator* group, int* device) {
    *device = group->device;
    return 0;
}

API int ncclCommUserRank(const Communicator* group, int* rank) {
    *rank = group->rank;
    return 0;
}

API int ncclGroupStart() {
    return 0;
}

API int ncclGroupEnd() {
    return 0;
}
