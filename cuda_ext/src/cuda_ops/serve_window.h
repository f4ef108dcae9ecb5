// Rows of experts that somebody else asks for: gate, up and down of one request's experts, from this card's slots or, where they
// have just been taken out of those, from the arena in place.
//
// Two launches per request, which name no layer: the request does. So they can be enqueued before there is one. Kernels of one row
// do it all: what several rows want of one expert counts as so many experts. Bits: those of gate_up_window and down_window.
#pragma once
#include <cuda_runtime.h>

#include <vector>

#include "cuda_ops/down_window.h"
#include "cuda_ops/gate_up_window.h"
#include "cuda_ops/window_state.h"

namespace tandem::cuda {

// How one layer's experts are computed for others: what each kernel does, for requests of up to so many rows.
template <class Problem, class Plan>
struct Served {
    Problem problem;
    Plan plan;
};
using ServedGateUp = Served<GateUpProblem, GateUpPlan>;
using ServedDown = Served<DownProblem, DownPlan>;
struct ServedLayer {
    ServedGateUp gate_up;
    ServedDown down;
};

// On the card, zeroed at first.
struct ServedState {
    uint32_t num_blocks;  // that are through with the request
    uint64_t rows;
    uint64_t late_experts;
};

// The same for the host, in mapped memory.
struct ServedCounts {
    uint32_t answered;  // number of the last request that was answered
    uint64_t rows;
    uint64_t late_experts;  // were no longer in a slot
};

struct ServeProblem {
    MissPost post;              // at the addresses of the side that serves
    const ServedLayer* layers;  // on the card: [num_layers] for requests of one row, then as many for those of up to max_rows
    int32_t num_layers;
    int32_t max_rows;
    int32_t max_experts;  // of a request
    int32_t max_pairs;
    ServedState* state;
    ServedCounts* counts;
    int32_t gate_up_blocks;
    uint32_t gate_up_shared_bytes;
    int32_t down_blocks;
    uint32_t down_shared_bytes;
};

struct ServedShape {
    int32_t num_experts;
    int32_t top_k;
    BlobPart gate;
    BlobPart up;
    BlobPart down;
    ExpertPlaces places;
    float* h;  // [rows * top_k, width], on the card
};

// For requests of up to `num_rows` rows. `shares_card`: with windows of the card's own, which wait for rows of others themselves.
// Throws std::invalid_argument for what the card cannot hold, or not beside a kernel that waits.
ServedLayer plan_served(const ServedShape& shape, int num_rows, const CardShape& card, bool shares_card);

// Sizes of the launches that fit all of the layers.
void size_launches(ServeProblem& problem, const std::vector<ServedLayer>& layers);

// A request as it lies in memory, from link::Request on: 16-byte units of everything, and of what a request of one row has.
struct RequestFetch {
    const uint4* from;
    uint4* to;
    int32_t num_units;
    int32_t one_row_units;
};

// Brings a request nearer. By a kernel, since the copy engine's queue may hold gigabytes for the slots.
void fetch_request(const RequestFetch& fetch, cudaStream_t stream);

// Answers request `number`, which the stream has waited for. `fetched`: right behind fetch_request.
void serve_window(const ServeProblem& problem, uint32_t number, bool fetched, cudaStream_t stream);

}  // namespace tandem::cuda
