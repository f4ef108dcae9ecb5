// The routed experts of a window on the card: what gate_up_window and down_window share.
//
// gate_up_window  norm of the hidden rows; top-k; residency look-up; posts of what others compute; silu(gate(x)) * up(x)
// down_window     top-k again, weights; down of what gate_up left; the others' rows; combination in the list's order; + hidden
//
// Bits: those of ops/norm.h, ops/route.h and ops/experts.h, wherever an expert is computed.
//
// Tiers: a resident expert is `own`, one in the slots of the second card `peer`, one that the other engine offers `linked`. Of the
// m distinct others, in order of first appearance (pair = row * top_k + place), the first floor(m * streamed.own + 1/2) are
// `streamed`: the card reads them in place from the arena, if that has an address on the card. So are those up to
// floor(m * (streamed.own + streamed.peer) + 1/2), but by the second card. The rest are posted to the `host`.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/host_device.h"
#include "cuda_ops/window_state.h"
#include "ops/gating.h"
#include "quant/row.h"

namespace tandem::cuda {

constexpr int kMaxRoutedExperts = 512;  // of a layer
constexpr int kMaxTopK = 16;

// How one layer chooses experts.
struct Choice {
    const int64_t* sums;  // [rows, experts], ops/router_sum.h
    int32_t num_experts;  // 1..kMaxRoutedExperts
    int32_t top_k;        // 1..kMaxTopK
    Gating gating;
    bool renormalise;
    float scale;
};

// Entries of a card's table that are no slots.
constexpr int32_t kAbsent = -1;
constexpr int32_t kAtPeer = -2;     // in a slot of the second card
constexpr int32_t kAtPartner = -3;  // absent, but the other engine offers it; never in the table itself

// Where one layer's blobs lie.
struct ExpertPlaces {
    const int32_t* slots;            // [experts] slot, kAbsent or kAtPeer, on the card; changes only between windows
    const uint8_t* offered;          // [experts] on the card: not 0 where the other engine computes what this card lacks; or null
    const uint8_t* slot_base;        // slot s lies at slot_base + s * blob_bytes
    const uint8_t* arena;            // the layer's blobs as the card sees them in host memory, or null
    size_t blob_bytes;               // a multiple of 256
    const StreamedRatios* streamed;  // on the card, of the window; or null: nothing is streamed
};

// One matrix inside a blob.
struct BlobPart {
    quant::Type type;
    int32_t rows;
    int32_t columns;
    size_t offset;  // a multiple of 16
    size_t row_bytes;
};

// What the kernels are planned for.
struct CardShape {
    int32_t num_multiprocessors;
    size_t block_shared_bytes;  // most dynamic shared memory of a block
    size_t card_shared_bytes;   // shared memory of a multiprocessor
    int32_t window_blocks = 1;  // of a kernel that streams weights, per multiprocessor

    int32_t num_window_blocks() const { return num_multiprocessors * window_blocks; }
    // Of a block that leaves room for `percent` of the multiprocessor to the kernels before and after it.
    size_t modest_shared_bytes(size_t percent) const {
        return std::min(block_shared_bytes, card_shared_bytes * percent / 100 / window_blocks);
    }
};

// Threads of a block. Windows of one row have kernels of their own, less code and half the registers, so that two blocks share a
// multiprocessor and the next kernel begins while one runs; those of several rows take all registers of one.
constexpr int kWindowThreads = 512;
constexpr int kWindowWarps = kWindowThreads / 32;
constexpr int kRoomyThreads = 256;  // several rows on half of a multiprocessor

constexpr uint32_t kBarrierBytes = 16;  // of a stage
constexpr uint32_t kNoteBytes = 32;     // at its beginning: what it was fetched for
constexpr uint32_t kStateBytes = 16;    // of a ring
constexpr int kMaxStages = 4;           // of a warp

// The rings through which the warps of a block fetch weight rows into shared memory, `num_stages` each.
struct RingPlan {
    int32_t num_warps;     // that fetch and compute; the others only help elsewhere
    int32_t num_stages;    // of a warp
    int32_t stage_rows;    // rows of each of the stage's matrices
    uint32_t stage_bytes;  // a multiple of 16, with its note
    uint32_t nbytes;       // of all rings with their states and barriers
};

// Where the barriers of all rings begin, behind their states, and the stages behind those.
TANDEM_HD constexpr uint32_t barriers_at(const RingPlan& plan) {
    return static_cast<uint32_t>(plan.num_warps) * kStateBytes;
}
TANDEM_HD constexpr uint32_t stages_at(const RingPlan& plan) {
    return barriers_at(plan) + static_cast<uint32_t>(plan.num_warps * plan.num_stages) * kBarrierBytes;
}
// Stages of one ring that fit.
constexpr size_t stages_fitting(size_t available, size_t stage_bytes) {
    return available < kStateBytes ? 0 : (available - kStateBytes) / (kBarrierBytes + stage_bytes);
}
// Of all rings; `stage_bytes` with the note.
constexpr size_t ring_bytes(size_t num_warps, size_t num_stages, size_t stage_bytes) {
    return num_warps * (kStateBytes + num_stages * (kBarrierBytes + stage_bytes));
}

struct WantedRings {
    int num_warps;
    int num_stages;
    int stage_rows;
};

// What copies of rows are rounded to where they come from host memory: others cross the bus in twice as many pieces.
constexpr uint32_t kStreamUnit = 128;

// One row of each matrix that lies in a stage, and what copies of some rows of them may be longer.
struct StagedRows {
    size_t nbytes;
    size_t margin_bytes;

    // A stage of so many rows.
    size_t stage_bytes(int rows) const { return kNoteBytes + (rows * nbytes + 15) / 16 * 16 + margin_bytes; }
};
StagedRows staged_rows(const BlobPart& part);
StagedRows operator+(const StagedRows& a, const StagedRows& b);

// The best rings that fit into `available` bytes: whole stages if as many as wanted fit, else smaller ones, else fewer warps.
// num_warps is 0 where nothing fits.
RingPlan plan_rings(size_t available, const WantedRings& wanted, const StagedRows& staged);

// The shared memory of an input row: quantised groups, or floats where the type wants those.
size_t input_row_bytes(quant::Type type, int64_t columns);

// Throws std::invalid_argument for numbers beyond the limits of these kernels.
void check_routing(int num_rows, const Choice& choice);
void check_part(const BlobPart& part, const ExpertPlaces& places);

// Gives out a block's shared memory, piece by piece.
class SharedPieces {
  public:
    uint32_t take(size_t nbytes) {
        const auto offset = static_cast<uint32_t>(used_);
        used_ += (nbytes + 63) / 64 * 64;
        return offset;
    }
    size_t used() const { return used_; }

  private:
    size_t used_ = 0;
};

}  // namespace tandem::cuda
