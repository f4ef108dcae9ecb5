// The down matrices of a window's routed experts, the rows of others, and the combination: hidden += sum of weight * row, per row
// in the order of its routed list. Shapes and tiers: experts_window.h.
#pragma once
#include <cuda_runtime.h>

#include "cuda_ops/experts_window.h"
#include "cuda_ops/miss_post.h"

namespace tandem::cuda {

enum class Polling {
    one_block,    // asks who computes the rows; the others ask a flag on the card
    every_block,  // asks them
};

struct DownProblem {
    int32_t num_rows;  // 1..kMaxWindowRows
    Choice choice;     // its sums come from a kernel before the one right before this one
    ExpertPlaces places;
    BlobPart down;   // [hidden, width]
    const float* h;  // [pairs, width], of gate_up_window, the kernel right before
    float* hidden;   // [rows, hidden], added to
    int32_t layer;
    MissPost posts[kNumSources];  // as those of gate_up_window
    const WindowWords* words;
    MissState* state;
    uint32_t* uses;                 // [experts] of the layer, added to; or null
    unsigned long long* tier_rows;  // [kNumTiers], added to; or null
    Polling polling = Polling::one_block;
    // Whether the kernel after this one may start only when no block waits any more. Else the two together take a multiprocessor,
    // and two engines that compute for each other on such cards would wait for ever.
    bool leaves_room = false;
};

// The grid, and offsets into a block's shared memory.
struct DownPlan {
    int32_t num_blocks;
    int32_t block_columns;  // of the output, per block
    int32_t held_pairs;     // whose input rows are in shared memory at a time
    bool wants_values;      // input rows are floats, else quantised
    int32_t row_groups;     // of one such row
    uint32_t table;
    uint32_t sums;    // float [rows, block_columns]: the hidden rows before the addition
    uint32_t rows;    // float [pairs, block_columns]: the card's rows, then those of others
    uint32_t row_of;  // int32 [pairs]: which of them is a pair's
    uint32_t held;    // input rows [held_pairs]
    uint32_t rings;
    uint32_t shared_bytes;
    RingPlan ring_plan;
};

// Throws std::invalid_argument for problems that the card cannot hold.
DownPlan plan_down(const DownProblem& problem, const CardShape& card);

// `dependent`: a programmatic dependent launch.
void down_window(const DownProblem& problem, const CardShape& card, bool dependent, cudaStream_t stream);

}  // namespace tandem::cuda
