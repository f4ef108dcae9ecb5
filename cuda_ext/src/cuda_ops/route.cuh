// The routed list of a window, by one block: which experts, where they lie, who takes which rows. Every block that needs the list
// computes it again; the bits are those of ops/route.h.
#pragma once
#include <cuda_runtime.h>

#include "cache/tier.h"
#include "cuda_ops/experts_window.h"
#include "cuda_ops/miss_post.h"
#include "cuda_ops/window_state.h"
#include "quant/arithmetic.h"

namespace tandem::cuda {

constexpr int kMaxPairs = kMaxWindowRows * kMaxTopK;

// Who computes an expert: the card, or a source of rows.
constexpr int kCardSide = kNumSources;
constexpr int kNumSides = kNumSources + 1;

// One distinct expert of the window.
struct RoutedExpert {
    const uint8_t* blob;  // as the card reads it; null where it does not
    int32_t expert;
    int32_t first;  // its pairs are pairs[first .. first + count), rows rising
    int32_t count;
    int16_t tier;         // Tier
    int16_t side;         // kCardSide or a Source
    int32_t side_first;   // the first of its rows among those of all experts of its side
    uint32_t input_rows;  // row of pair i in bits 4 i ..
};

// In shared memory. A pair is row * top_k + place; experts stand in order of first appearance.
struct RoutedList {
    int32_t slots[kMaxRoutedExperts];  // of the layer: as in ExpertPlaces, or kAtPartner
    int32_t ids[kMaxPairs];
    float weights[kMaxPairs];
    int32_t expert_of[kMaxPairs];   // index into `experts`
    int32_t side_place[kMaxPairs];  // place of the pair's row among those of its side
    int32_t pairs[kMaxPairs];
    RoutedExpert experts[kMaxPairs];
    uint8_t of_side[kNumSides][kMaxPairs];  // indices of its experts
    int32_t first_pair[kMaxPairs];          // scratch: the first pair with the same expert
    uint32_t firsts[kMaxPairs / 32];        // scratch: which pairs are such
    uint32_t misses[kMaxPairs / 32];        // scratch: and absent
    int32_t num_experts;
    int32_t num_of_side[kNumSides];  // experts
    int32_t pairs_of_side[kNumSides];
};

// The residency table of the layer; no kernel writes it, so this may come before wait_prerequisites(). A barrier must follow.
__device__ __forceinline__ void load_slots(RoutedList& r, const ExpertPlaces& places, int num_experts, int thread,
                                           int num_threads) {
    for (int i = thread; i < num_experts; i += num_threads) {
        const int32_t slot = __ldcg(places.slots + i);
        r.slots[i] = slot == kAbsent && places.offered && __ldcg(places.offered + i) ? kAtPartner : slot;
    }
}

// Everything but the weights. All threads of the block call, at least kMaxPairs + kNumSides of them; has barriers inside and one at
// its end. Not inlined, as weigh_rows: gate_up and down share their instructions.
__device__ void route_rows(RoutedList& r, const Choice& p, const ExpertPlaces& places, int num_rows, int thread, int num_threads);

// The weights, after route_rows. `gates`: shared, [num_rows, experts]. A barrier must follow.
__device__ void weigh_rows(RoutedList& r, const Choice& p, int num_rows, float* gates, int thread, int num_threads);

}  // namespace tandem::cuda
