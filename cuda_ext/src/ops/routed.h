// The routed list of one layer: who wants which expert, by token and by expert.
#pragma once
#include <algorithm>
#include <cstdint>

#include "base/buffer.h"
#include "base/require.h"

namespace tandem {

// The pairs of one expert: `count` of them from `first` in Routed::order.
struct alignas(32) ExpertRows {
    const uint8_t* blob;
    int32_t expert;
    int32_t first;
    int32_t count;
};
static_assert(sizeof(ExpertRows) == 32);

// A pair is one routed place of one token: pair = row * top_k + place in the token's list.
struct Routed {
    int32_t* ids;          // [pairs] expert of each pair
    float* weights;        // [pairs]
    int32_t* order;        // [pairs] pairs by expert, tokens rising within one
    int32_t* places;       // [pairs] the inverse: where a pair stands in `order`
    int32_t* counts;       // [experts] scratch
    ExpertRows* experts;   // [min(experts, pairs)] those in use: from the front, by id, those computed here
    int32_t* num_experts;  // how many of them
    int32_t* num_linked;   // how many another engine computes; they stand at the end of `experts`
    int capacity;          // of `experts`
    int top_k;

    ExpertRows& linked(int index) const { return experts[capacity - 1 - index]; }

    // Carves the parts out of one piece of memory; appliance/memory/workspace.py knows the same sizes.
    static Routed in(const View& memory, int max_rows, int top_k, int num_experts);
};

inline Routed Routed::in(const View& memory, int max_rows, int top_k, int num_experts) {
    constexpr size_t kAlignment = 64;
    const size_t pairs = static_cast<size_t>(max_rows) * top_k;
    size_t used = 0;
    const auto take = [&](size_t nbytes) {
        std::byte* part = memory.data() + used;
        used += (nbytes + kAlignment - 1) / kAlignment * kAlignment;
        return part;
    };
    Routed routed{};
    routed.num_experts = reinterpret_cast<int32_t*>(take(2 * sizeof(int32_t)));
    routed.num_linked = routed.num_experts + 1;
    routed.ids = reinterpret_cast<int32_t*>(take(pairs * sizeof(int32_t)));
    routed.weights = reinterpret_cast<float*>(take(pairs * sizeof(float)));
    routed.order = reinterpret_cast<int32_t*>(take(pairs * sizeof(int32_t)));
    routed.places = reinterpret_cast<int32_t*>(take(pairs * sizeof(int32_t)));
    routed.counts = reinterpret_cast<int32_t*>(take(num_experts * sizeof(int32_t)));
    routed.capacity = static_cast<int>(std::min<size_t>(num_experts, pairs));
    routed.experts = reinterpret_cast<ExpertRows*>(take(routed.capacity * sizeof(ExpertRows)));
    routed.top_k = top_k;
    require(used <= memory.nbytes,
            "the routed list needs " + std::to_string(used) + " bytes, but got " + std::to_string(memory.nbytes));
    return routed;
}

}  // namespace tandem
