// silu(gate(x)) * up(x) of a window's routed experts, for the pairs that the card computes; the others are posted.
//
// x is the norm of the hidden rows. `h` [pairs, width]: pairs that are posted are not written. Shapes and tiers: experts_window.h.
#pragma once
#include <cuda_runtime.h>

#include "base/host_device.h"
#include "cuda_ops/experts_window.h"
#include "cuda_ops/miss_post.h"

namespace tandem::cuda {

struct GateUpProblem {
    int32_t num_rows;     // 1..kMaxWindowRows
    const float* hidden;  // [rows, columns]
    const float* gamma;   // [columns]
    float eps;
    quant::ActGroup* groups;  // [rows, ceil(columns / 256)] and
    float* values;            // [rows, columns]: between norm_window and this, quantised or as floats, but for one row of one type
    Choice choice;            // its sums come from a kernel before the one right before this one
    ExpertPlaces places;
    BlobPart gate;  // [width, columns]
    BlobPart up;
    float* h;
    int32_t layer;
    MissPost posts[kNumSources];  // as the card sees them; one that no expert needs may be null
    MissState* state;
};

// The grid, and offsets into a block's shared memory.
struct GateUpPlan {
    int32_t num_blocks;
    bool gate_wants_values;  // floats, else quantised input rows
    bool up_wants_values;
    uint32_t groups;
    uint32_t values;
    uint32_t inverse;
    uint32_t gate_table;
    uint32_t up_table;
    uint32_t scratch;  // of the norm of one row: float [columns], where the stages will be; `values` where there are some
    uint32_t shares;   // ShareOfExperts [warps]
    uint32_t firsts;   // FirstStage [warps], for one row and one type
    uint32_t results;  // float [warps, kMaxWindowRows, 2 * stage_rows]
    uint32_t rings;
    uint32_t shared_bytes;
    RingPlan ring_plan;

    TANDEM_HD bool wants_groups() const { return !gate_wants_values || !up_wants_values; }
    TANDEM_HD bool wants_values() const { return gate_wants_values || up_wants_values; }
};

// Throws std::invalid_argument for problems that the card cannot hold.
GateUpPlan plan_gate_up(const GateUpProblem& problem, const CardShape& card);

// `dependent`: a programmatic dependent launch.
void gate_up_window(const GateUpProblem& problem, const CardShape& card, bool dependent, cudaStream_t stream);

}  // namespace tandem::cuda
