// The routed list of a window, by one block: which experts, where they lie, who takes which rows. Every block that needs the list
// computes it again; the bits are those of ops/route.h.
#pragma once
#include <cuda_runtime.h>

#include "cache/tier.h"
#include "cuda_ops/experts_window.h"
#include "cuda_ops/gates.cuh"
#include "cuda_ops/miss_post.h"
#include "cuda_ops/window_state.h"
#include "device/primitives.cuh"
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

__device__ __forceinline__ bool is_streamed(const RoutedExpert& expert) {
    return expert.tier == static_cast<int16_t>(Tier::streamed);
}

// Rows of a part of an expert's blob, which has less than 4 GiB.
__device__ __forceinline__ device::AlignedSpan span_of(const RoutedExpert& expert, const BlobPart& part, int row, int num_rows) {
    const auto row_bytes = static_cast<uint32_t>(part.row_bytes);
    return device::aligned_span(expert.blob + (static_cast<uint32_t>(part.offset) + static_cast<uint32_t>(row) * row_bytes),
                                static_cast<uint32_t>(num_rows) * row_bytes, is_streamed(expert) ? kStreamUnit : device::kCopyUnit);
}

// In shared memory. A pair is row * top_k + place; experts stand in order of first appearance.
struct RoutedList {
    int32_t slots[kMaxRoutedExperts];  // of the layer: as in ExpertPlaces, or kAtPartner
    int32_t ids[kMaxPairs];
    float weights[kMaxPairs];
    int32_t expert_of[kMaxPairs];   // index into `experts`
    int32_t side_place[kMaxPairs];  // place of the pair's row among those of its side
    int32_t pairs[kMaxPairs];
    RoutedExpert experts[kMaxPairs];
    uint8_t of_side[kNumSides][kMaxPairs];          // indices of its experts
    alignas(4) uint8_t rows_of[kMaxRoutedExperts];  // scratch: which rows chose an expert, one bit each
    uint8_t index_of[kMaxRoutedExperts];            // scratch: its index into `experts`
    StreamedRatios streamed;                        // as this card can
    int32_t num_experts;
    bool all_own;                    // of a window of one row: each expert lies in a slot of this card
    int32_t num_of_side[kNumSides];  // experts
    int32_t pairs_of_side[kNumSides];

    __device__ __forceinline__ bool asks_others() const {
        int num = 0;
#pragma unroll
        for (int source = 0; source < kNumSources; source++) num += num_of_side[source];
        return num > 0;
    }
};

// Returns when the posts of the layer are out, if there are some: reads from host memory that come before a post hold it up until
// they are through, since they queue for the same bus. All lanes of a warp call it before they read a streamed expert.
__device__ __forceinline__ void await_posts(const RoutedList& r, const MissState* state, int layer, int lane) {
    if (!r.asks_others()) return;
    if (lane == 0)
        while (device::load_acquire_device(&state->asked_layers) <= static_cast<uint32_t>(layer)) device::spin_pause();
    __syncwarp();
}

// The residency table of the layer and the window's ratios; no kernel writes them, so this may come before wait_prerequisites(). A
// barrier must follow.
__device__ __forceinline__ void load_slots(RoutedList& r, const ExpertPlaces& places, int num_experts, int thread,
                                           int num_threads) {
    if (thread == 0) {
        r.streamed = places.streamed ? *places.streamed : StreamedRatios{};
        if (!places.arena) r.streamed.own = 0.0f;
    }
    for (int i = thread; i < num_experts; i += num_threads) {
        const int32_t slot = __ldcg(places.slots + i);
        r.slots[i] = slot == kAbsent && places.offered && __ldcg(places.offered + i) ? kAtPartner : slot;
    }
}

// Of the experts lane * n and following, for n experts a lane; a key rises with the score.
struct ScoreKeys {
    uint32_t key[kMaxRoutedExperts / 32];
};

namespace detail {

constexpr uint32_t kNoKey = 0;  // below every score's key

template <int per_lane>
__device__ __forceinline__ void load_keys(ScoreKeys& keys, const int64_t* sums, int num_experts, int lane) {
#pragma unroll
    for (int i = 0; i < per_lane; i++) {
        const int expert = lane * per_lane + i;
        keys.key[i] = expert < num_experts ? score_key(load_sum(sums + expert)) : kNoKey;
    }
}

// Of two neighbouring keys the greater one first; equal ones stay.
__device__ __forceinline__ void order_keys(uint32_t& first, int& first_at, uint32_t& second, int& second_at) {
    const uint32_t less = min(first, second);
    const int first_was = first_at;
    const bool turn = second > first;
    first_at = turn ? second_at : first_at;
    second_at = turn ? first_was : second_at;
    first = max(first, second);
    second = less;
}

// The top_k greatest of up to 128 by one warp, ties by lower id: a lane's four are sorted, then the greatest of their first ones is
// taken top_k times. Uses the keys up.
__device__ __forceinline__ void choose_of_four(ScoreKeys& all, int top_k, int32_t* ids, int lane) {
    uint32_t (&keys)[kMaxRoutedExperts / 32] = all.key;
    int at[4] = {0, 1, 2, 3};
#pragma unroll
    for (int end = 3; end > 0; end--)
#pragma unroll
        for (int i = 0; i < end; i++) order_keys(keys[i], at[i], keys[i + 1], at[i + 1]);
#pragma unroll 1
    for (int place = 0; place < top_k; place++) {
        const uint32_t greatest = __reduce_max_sync(~0u, keys[0]);
        const bool wins = lane == __ffs(__ballot_sync(~0u, keys[0] == greatest)) - 1;
        if (wins) ids[place] = 4 * lane + at[0];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            keys[i] = !wins ? keys[i] : i < 3 ? keys[i + 1] : kNoKey;
            at[i] = wins && i < 3 ? at[i + 1] : at[i];
        }
    }
}

// The same for any number: a lane looks for the greatest of its own each time.
template <int per_lane>
__device__ __forceinline__ void choose_among(ScoreKeys& all, int top_k, int32_t* ids, int lane) {
    uint32_t (&keys)[kMaxRoutedExperts / 32] = all.key;
#pragma unroll 1
    for (int place = 0; place < top_k; place++) {
        uint32_t best = kNoKey;
        int at = 0;
#pragma unroll
        for (int i = 0; i < per_lane; i++) {
            at = keys[i] > best ? i : at;
            best = max(best, keys[i]);
        }
        const uint32_t greatest = __reduce_max_sync(~0u, best);
        const int winner = __ffs(__ballot_sync(~0u, best == greatest)) - 1;
        if (lane != winner) continue;
        ids[place] = lane * per_lane + at;
#pragma unroll
        for (int i = 0; i < per_lane; i++) keys[i] = i == at ? kNoKey : keys[i];
    }
}

__device__ __forceinline__ void choose_row(ScoreKeys& keys, int num_experts, int top_k, int32_t* ids, int lane) {
    if (num_experts <= 128)
        choose_of_four(keys, top_k, ids, lane);
    else
        choose_among<kMaxRoutedExperts / 32>(keys, top_k, ids, lane);
}

// How many of a window's absent experts cards read from the arena.
struct StreamedShares {
    int own;
    int both;  // this card and the second one
};

__device__ __forceinline__ StreamedShares streamed_shares(const StreamedRatios& streamed, int num_misses) {
    const float misses = static_cast<float>(num_misses);
    return {static_cast<int>(quant::add(quant::mul(misses, streamed.own), 0.5f)),
            static_cast<int>(quant::add(quant::mul(misses, quant::add(streamed.own, streamed.peer)), 0.5f))};
}

// Who computes an expert of a table's entry, and where its bytes are. `miss`: how many absent experts come before it.
__device__ __forceinline__ void place_expert(RoutedExpert& expert, const ExpertPlaces& places, int slot, int miss,
                                             const StreamedShares& shares) {
    const bool absent = slot == kAbsent, own_streams = absent && miss < shares.own, streams = absent && miss < shares.both;
    expert.tier = static_cast<int16_t>(slot >= 0            ? Tier::own
                                       : slot == kAtPeer    ? Tier::peer
                                       : slot == kAtPartner ? Tier::linked
                                       : streams            ? Tier::streamed
                                                            : Tier::host);
    expert.side = slot >= 0 || own_streams     ? kCardSide
                  : slot == kAtPeer || streams ? static_cast<int>(kPeerSource)
                  : slot == kAtPartner         ? static_cast<int>(kLinkedSource)
                                               : static_cast<int>(kHostSource);
    expert.blob = slot >= 0     ? places.slot_base + static_cast<ptrdiff_t>(slot) * static_cast<ptrdiff_t>(places.blob_bytes)
                  : own_streams ? places.arena + expert.expert * places.blob_bytes
                                : nullptr;
}

// The whole list of a window of one row by one warp: every expert has one pair, in the order of the list.
__device__ __forceinline__ void list_one_row(RoutedList& r, const ExpertPlaces& places, int top_k, int lane) {
    const bool listed = lane < top_k;
    const int id = listed ? r.ids[lane] : 0, slot = listed ? r.slots[id] : 0;
    const bool all_own = __ballot_sync(~0u, slot < 0) == 0;
    RoutedExpert expert{};
    expert.expert = id;
    expert.first = lane;
    expert.count = 1;
    if (all_own) {  // what follows from the general case, in a few instructions
        place_expert(expert, places, max(slot, 0), 0, {});
        expert.side_first = lane;
        if (lane < kNumSides) r.num_of_side[lane] = r.pairs_of_side[lane] = lane == kCardSide ? top_k : 0;
    } else {
        const uint32_t before = (1u << lane) - 1, misses = __ballot_sync(~0u, slot == kAbsent);
        place_expert(expert, places, slot, __popc(misses & before), streamed_shares(r.streamed, __popc(misses)));
#pragma unroll
        for (int side = 0; side < kNumSides; side++) {
            const uint32_t members = __ballot_sync(~0u, listed && expert.side == side);
            if (expert.side == side) expert.side_first = __popc(members & before);
            if (lane == side) r.num_of_side[side] = r.pairs_of_side[side] = __popc(members);
        }
    }
    if (listed) {
        r.experts[lane] = expert;
        r.of_side[expert.side][expert.side_first] = static_cast<uint8_t>(lane);
        r.expert_of[lane] = r.pairs[lane] = lane;
        r.side_place[lane] = expert.side_first;
    }
    if (lane == 0) {
        r.num_experts = top_k;
        r.all_own = all_own;
    }
}

}  // namespace detail

// Everything but the weights. All threads of the block call; has barriers inside and one at its end.
__device__ void route_rows(RoutedList& r, const Choice& p, const ExpertPlaces& places, int num_rows, int thread, int num_threads);

// The keys of one row of sums, by one warp.
__device__ __forceinline__ ScoreKeys load_keys(const int64_t* sums, int num_experts, int lane) {
    ScoreKeys keys{};
    if (num_experts <= 128)
        detail::load_keys<4>(keys, sums, num_experts, lane);
    else
        detail::load_keys<kMaxRoutedExperts / 32>(keys, sums, num_experts, lane);
    return keys;
}

// route_rows for a window of one row, by one warp and inlined. Uses the keys up.
__device__ __forceinline__ void route_one_row(RoutedList& r, const Choice& p, const ExpertPlaces& places, ScoreKeys& keys,
                                              int lane) {
    detail::choose_row(keys, p.num_experts, p.top_k, r.ids, lane);
    __syncwarp();
    detail::list_one_row(r, places, p.top_k, lane);
}

// The weights of a routed row, by one warp. `inverse`: 1 / rms.
__device__ __forceinline__ void weigh_row(RoutedList& r, const Choice& p, int row, float inverse, int lane) {
    const int pair = row * p.top_k + lane, id = lane < p.top_k ? r.ids[pair] : 0;
    const float weight =
        list_weight(p.sums + row * p.num_experts, p.num_experts, p.top_k, p.gating, p.renormalise, inverse, id, lane);
    if (lane < p.top_k) r.weights[pair] = quant::mul(weight, p.scale);
}

}  // namespace tandem::cuda
