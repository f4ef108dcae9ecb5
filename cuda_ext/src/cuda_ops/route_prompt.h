// Routing of a prompt's chunk on the card: the routed list of every row, and the pairs by expert.
//
// A pair is one place of one row's list: pair = row * top_k + place. Ids and weights have the bits of the window path
// (ops/route.h), so that a hidden state is routed the same way in both.
#pragma once
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "ops/gating.h"
#include "ops/routed.h"

namespace tandem::cuda {

constexpr int kMaxPromptExperts = 1024;
constexpr int kMaxPromptTopK = 32;

// Up to 128 pairs of one expert, the work of one row of blocks.
struct RowTile {
    int32_t index;  // in ExpertList::experts
    int32_t first;  // of the expert's pairs
};

// Experts whose rows are computed together, in the card's memory. Blobs are 16-byte aligned.
struct ExpertList {
    ExpertRows* experts;  // in any order
    int32_t* num_experts;
    RowTile* tiles;  // [max_row_tiles], filled by list_tiles_prompt
    int32_t* num_tiles;
};

// How many tiles `num_pairs` pairs of up to `num_experts` experts can make.
constexpr int max_row_tiles(int num_pairs, int num_experts) {
    constexpr int kRows = 128;
    return num_pairs / kRows + (num_pairs < num_experts ? num_pairs : num_experts);
}

// Tiles of a list that the caller wrote.
void list_tiles_prompt(const ExpertList& list, cudaStream_t stream);

// Routed pairs in the card's memory.
struct RoutedPrompt {
    int32_t* ids;     // [pairs] expert of each pair
    float* weights;   // [pairs]
    int32_t* order;   // [pairs] pairs by expert, rows rising within one
    int32_t* places;  // [pairs] the inverse
    int32_t* counts;  // [experts] pairs of each expert
    int32_t* firsts;  // [experts] where they begin in `order`
    int top_k;
    int num_experts;
};

// Where a layer's experts lie on the card, and what is counted. `uses` and `tier_rows` may be null.
struct PromptResidency {
    const int32_t* slots;  // [experts] slot or -1
    const uint8_t* slot_base;
    size_t blob_bytes;
    uint32_t* uses;                 // [experts] += rows
    unsigned long long* tier_rows;  // [kNumTiers] rows of resident experts go to Tier::own, all others to Tier::streamed
};

struct RoutePromptProblem {
    const int64_t* sums;   // [rows, experts], cuda_ops/router.h
    const float* inverse;  // [rows] 1 / rms
    Gating gating;
    bool renormalise;
    float scale;
    RoutedPrompt routed;
    PromptResidency residency;
    ExpertList resident;  // gets the experts in use that have a slot, by id, and their tiles
};

// Throws std::invalid_argument for more than 1,024 experts or a list longer than 32 or than the experts.
void route_prompt(const RoutePromptProblem& problem, int num_rows, cudaStream_t stream);

}  // namespace tandem::cuda
