// The routed list of a window, by one block: which experts, where they lie, who takes which rows. Every block that needs the list
// computes it again; the bits are those of ops/route.h.
#pragma once
#include <cuda_runtime.h>

#include "cache/tier.h"
#include "cuda_ops/experts_window.h"
#include "cuda_ops/window_state.h"
#include "quant/arithmetic.h"

namespace tandem::cuda {

constexpr int kMaxPairs = kMaxWindowRows * kMaxTopK;

// One distinct expert of the window.
struct RoutedExpert {
    const uint8_t* blob;  // as the card reads it; null where the host computes it
    int32_t expert;
    int32_t first;  // its pairs are pairs[first .. first + count), rows rising
    int32_t count;
    int32_t tier;         // Tier
    int32_t tier_first;   // the first of its rows among those of all host experts, or among those of all others
    uint32_t input_rows;  // row of pair i in bits 4 i ..
};

// In shared memory. A pair is row * top_k + place; experts stand in order of first appearance.
struct RoutedList {
    int32_t slots[kMaxRoutedExperts];  // of the layer
    int32_t ids[kMaxPairs];
    float weights[kMaxPairs];
    int32_t expert_of[kMaxPairs];   // index into `experts`
    int32_t tier_place[kMaxPairs];  // place of the pair's row among those of its side, host or card
    int32_t pairs[kMaxPairs];
    RoutedExpert experts[kMaxPairs];
    int32_t on_card[kMaxPairs];  // indices of the experts that the card computes
    int32_t on_host[kMaxPairs];
    int32_t first_pair[kMaxPairs];    // scratch: the first pair with the same expert
    uint32_t firsts[kMaxPairs / 32];  // scratch: which pairs are such
    uint32_t misses[kMaxPairs / 32];  // scratch: and not resident
    int32_t num_experts;
    int32_t num_on_card;
    int32_t num_on_host;
    int32_t num_card_pairs;
    int32_t num_host_pairs;
};

// The residency table of the layer; no kernel writes it, so this may come before wait_prerequisites(). A barrier must follow.
__device__ __forceinline__ void load_slots(RoutedList& r, const ExpertPlaces& places, int num_experts, int thread,
                                           int num_threads) {
    for (int i = thread; i < num_experts; i += num_threads) r.slots[i] = __ldcg(places.slots + i);
}

// Everything but the weights. All threads of the block call, at least kMaxPairs of them; has barriers inside and one at its end.
// Not inlined, as weigh_rows: gate_up and down share their instructions.
__device__ void route_rows(RoutedList& r, const Choice& p, const ExpertPlaces& places, int num_rows, int thread, int num_threads);

// The weights, after route_rows. `gates`: shared, [num_rows, experts]. A barrier must follow.
__device__ void weigh_rows(RoutedList& r, const Choice& p, int num_rows, float* gates, int thread, int num_threads);

}  // namespace tandem::cuda
