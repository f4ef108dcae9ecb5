// The link file: one mapped file through which two engines compute each other's rows.
//
//   | header | role 0 | role 1 | residency of role 0 | of role 1 | channel 0 | channel 1 |
//
// Channel c carries requests of role c to the other role and the rows back. Every word has one writer:
//
//   requester   seq, request, experts, pair_rows, groups, values
//   server      done, status, late, rows; its role's words; its residency
//
//   requester: fills the request ── seq = n ──>  server: reads it, writes rows, status, late ── done = n ──> requester reads
//
// So `seq == done` means that the channel is the requester's, `seq != done` that it is the server's. A server that begins sets
// `status = dropped` and `done = seq`: what its predecessor left is not computed, and whoever waits for it is told so.
#pragma once
#include <cstddef>
#include <cstdint>

#include "base/buffer.h"
#include "quant/row.h"

namespace tandem::link {

constexpr uint64_t kMagic = 0x4b4e494c4d444e54;  // "TNDMLINK"
constexpr uint32_t kVersion = 2;
constexpr int kFingerprintBytes = 64;
constexpr size_t kLine = 64;
constexpr size_t kPage = 4096;

enum class FileState : uint32_t { empty, ready };
enum class Status : uint32_t { computed, dropped, refused };

// What both engines must have alike.
struct Geometry {
    uint32_t num_layers;
    uint32_t num_experts;
    uint32_t top_k;
    uint32_t max_rows;
    uint32_t hidden;
    uint32_t reserved;
};
static_assert(sizeof(Geometry) == 24);

struct alignas(kPage) FileHeader {
    uint64_t magic;
    uint32_t version;
    uint32_t state;  // FileState; the last word to be written
    char fingerprint[kFingerprintBytes];
    Geometry geometry;
    uint64_t total_bytes;
};
static_assert(sizeof(FileHeader) == kPage && offsetof(FileHeader, state) == 12 && offsetof(FileHeader, geometry) == 80);

// One engine, in its own words.
struct RoleWords {
    alignas(kLine) uint32_t pid;  // 0: not here
    uint32_t num_attached;        // counts its processes
    alignas(kLine) uint32_t heartbeat;
    alignas(kLine) uint32_t serving;
    alignas(kLine) uint32_t asking;  // its card may post requests by itself until this is 0 again
};
static_assert(sizeof(RoleWords) == 4 * kLine && offsetof(RoleWords, heartbeat) == kLine &&
              offsetof(RoleWords, serving) == 2 * kLine && offsetof(RoleWords, asking) == 3 * kLine);

struct ChannelWords {
    alignas(kLine) uint32_t seq;
    alignas(kLine) uint32_t done;
    uint32_t status;  // of request `done`
    uint32_t late;    // its experts that were no longer in a slot
};
static_assert(sizeof(ChannelWords) == 2 * kLine && offsetof(ChannelWords, done) == kLine &&
              offsetof(ChannelWords, status) == kLine + 4);

// The pairs of one expert: `count` of them from `first` in pair_rows and rows.
struct RequestExpert {
    uint32_t expert;
    uint32_t first;
    uint32_t count;
};

struct alignas(kLine) Request {
    uint32_t layer;
    uint32_t num_rows;
    uint32_t num_experts;
    uint32_t num_pairs;
};

// Addresses inside the mapped file, or inside memory of channel_bytes(geometry).
struct Channel {
    ChannelWords* words;
    Request* request;
    RequestExpert* experts;   // [min(experts, pairs)]
    int32_t* pair_rows;       // [pairs] which of the rows below
    quant::ActGroup* groups;  // [rows, groups of hidden]
    float* values;            // [rows, hidden]
    float* rows;              // [pairs, hidden]

    static Channel in(std::byte* memory, const Geometry& geometry);
};

size_t channel_bytes(const Geometry& geometry);

struct Parts {
    FileHeader* header;
    RoleWords* roles[2];
    uint8_t* resident[2];  // [layers, experts], 1 or 0
    Channel channels[2];
    size_t total_bytes;

    // `memory` may be null: then only total_bytes means anything.
    static Parts in(std::byte* memory, const Geometry& geometry);
};

}  // namespace tandem::link
