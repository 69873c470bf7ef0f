// Finds accesses of two streams to the same memory that no event orders.
//
// Each stream has a vector clock. Recording an event keeps the clock of its stream; waiting for the event, by a stream
// or by the host, merges that clock into the waiting one. An access is a race if its stream does not know of the last
// access by another stream. The time at which the streams have really run does not matter.
//
// Only buffers that a copy from the host has filled are followed. The blocks of torch's allocator are not, as it reuses
// them in the order of one stream.
#include "runtime.h"

constexpr size_t MIN_BUFFER_BYTES = 512;
constexpr size_t MAX_BUFFERS = 256;

void merge(VectorClock& into, const VectorClock& from) {
    for (int i = 0; i < MAX_STREAMS; i++) {
        if (from[i] > into[i]) into[i] = from[i];
    }
}

void tick(Stream* stream) {
    merge(stream->clock, state().host_clock);
    if (stream->id < MAX_STREAMS) stream->clock[stream->id]++;
}

void check_access(Stream* stream, const void* memory, size_t n_bytes, bool is_write, const std::string& by,
                  bool is_new_buffer) {
    if (!n_bytes || stream->id >= MAX_STREAMS) return;
    const char* begin = (const char*)memory;
    const char* end = begin + n_bytes;
    const Buffer::Access access{stream->clock[stream->id], by};
    auto is_unknown = [&](int other, const Buffer::Access& before) {
        return other != stream->id && stream->clock[other] < before.time;
    };
    auto report = [&](const char* kind, int other, const Buffer::Access& before) {
        note(std::string("race, ") + kind + ": " + by + " on stream " + std::to_string(stream->id) + " against " +
             before.by + " on stream " + std::to_string(other));
    };

    bool is_followed = false;
    for (Buffer& buffer : state().buffers) {
        if (buffer.end <= begin || end <= buffer.begin) continue;
        is_followed |= buffer.begin == begin && buffer.end == end;
        if (is_unknown(buffer.writer, buffer.write)) {
            report(is_write ? "write after write" : "read after write", buffer.writer, buffer.write);
        }
        if (is_write) {
            for (auto& [other, read] : buffer.reads) {
                if (is_unknown(other, read)) report("write after read", other, read);
            }
        }
        if (is_write && begin <= buffer.begin && buffer.end <= end) {
            buffer.reads.clear();
            buffer.writer = stream->id;
            buffer.write = access;
        } else {
            // A write of a part of the buffer counts as a read: the next write has to come later, and that is all.
            buffer.reads[stream->id] = access;
        }
    }

    if (is_new_buffer && !is_followed && n_bytes >= MIN_BUFFER_BYTES) {
        forget(begin, end);  // an older buffer, whose memory serves another one now
        if (state().buffers.size() >= MAX_BUFFERS) state().buffers.pop_front();
        state().buffers.push_back({begin, end, stream->id, access, {}});
    }
}

void forget(const char* begin, const char* end) {
    std::erase_if(state().buffers, [&](const Buffer& each) { return each.begin < end && begin < each.end; });
}
