#include "cuda_ops/route.cuh"

namespace tandem::cuda {

namespace {

constexpr uint32_t kNoKey = 0;  // below every logit's key

// Rises with the logit; both zeros are equal.
__device__ __forceinline__ uint32_t logit_key(float logit) {
    const uint32_t bits = quant::float_bits(quant::add(logit, 0.0f));
    return max(bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u), kNoKey + 1);
}

// The top_k greatest of a row by one warp, ties by lower id. Lane l looks at experts l * per_lane and following.
template <int per_lane>
__device__ __forceinline__ void choose_row(const float* logits, int num_experts, int top_k, int32_t* ids, int lane) {
    uint32_t keys[per_lane];
#pragma unroll
    for (int i = 0; i < per_lane; i++) {
        const int expert = lane * per_lane + i;
        keys[i] = expert < num_experts ? logit_key(__ldcg(logits + expert)) : kNoKey;
    }
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

// Weights of one row by one warp. `gates`: shared, [experts], scratch of this row.
__device__ __forceinline__ void weigh_row(const Choice& p, const float* logits, const int32_t* ids, float* gates, float* weights,
                                          int lane) {
    const bool listed = lane < p.top_k;
    float weight = 0.0f;
    if (p.gating == Gating::softmax) {
        const float max = __ldcg(logits + ids[0]);
        for (int i = lane; i < p.num_experts; i += 32) gates[i] = quant::exp_clamped(quant::add(__ldcg(logits + i), -max));
        __syncwarp();
        float sum = 0.0f;  // sum8 of ops/vector.h: lane j % 8 has chain j
#pragma unroll 8
        for (int i = lane % 8; i < p.num_experts; i += 8) sum = quant::add(sum, gates[i]);
#pragma unroll
        for (int step = 4; step > 0; step /= 2) sum = quant::add(sum, __shfl_xor_sync(~0u, sum, step));
        if (listed) weight = quant::div(gates[ids[lane]], sum);
    } else if (listed) {
        weight = quant::div(1.0f, quant::add(1.0f, quant::exp_clamped(-__ldcg(logits + ids[lane]))));
    }
    if (p.renormalise) {
        float sum = 0.0f;
        for (int place = 0; place < p.top_k; place++) sum = quant::add(sum, __shfl_sync(~0u, weight, place));
        weight = quant::div(weight, sum);
    }
    if (listed) weights[lane] = quant::mul(weight, p.scale);
}

// expert_of, pairs, experts[].expert, .first, .count, .input_rows. Thread p has pair p.
__device__ __forceinline__ void group_pairs(RoutedList& r, int num_pairs, int top_k, int thread) {
    const bool is_pair = thread < num_pairs;
    const int id = is_pair ? r.ids[thread] : -1;
    int first = thread, before = 0, count = 0;
    uint32_t input_rows = 0;
    for (int pair = is_pair ? 0 : num_pairs; pair < num_pairs; pair++) {
        if (r.ids[pair] != id) continue;
        first = min(first, pair);
        before += pair < thread;
        input_rows |= static_cast<uint32_t>(pair / top_k) << 4 * count;
        count++;
    }
    if (thread < kMaxPairs) {
        const bool is_first = is_pair && first == thread;
        const uint32_t firsts = __ballot_sync(~0u, is_first),
                       misses = __ballot_sync(~0u, is_first && r.slots[max(id, 0)] == kAbsent);
        r.first_pair[thread] = first;
        if (thread % 32 == 0) {
            r.firsts[thread / 32] = firsts;
            r.misses[thread / 32] = misses;
        }
    }
    __syncthreads();
    if (!is_pair) return;
    int index = 0, place = before;
    for (int word = 0; word <= first / 32; word++)
        index += __popc(r.firsts[word] & (word < first / 32 ? ~0u : (1u << first % 32) - 1));
    for (int pair = 0; pair < num_pairs; pair++) place += r.first_pair[pair] < first;
    r.expert_of[thread] = index;
    r.pairs[place] = thread;
    r.side_place[thread] = before;
    if (first != thread) return;
    RoutedExpert& expert = r.experts[index];
    expert.expert = id;
    expert.first = place;
    expert.count = count;
    expert.input_rows = input_rows;
}

// How many of a window's absent experts cards read from the arena.
struct StreamedShares {
    int own;
    int both;  // this card and the second one
};

__device__ __forceinline__ StreamedShares streamed_shares(const ExpertPlaces& places, int num_misses) {
    const float own = places.arena ? places.streamed_ratio : 0.0f, misses = static_cast<float>(num_misses);
    return {static_cast<int>(quant::add(quant::mul(misses, own), 0.5f)),
            static_cast<int>(quant::add(quant::mul(misses, quant::add(own, places.peer_ratio)), 0.5f))};
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

// .tier, .side and .blob of the experts. Thread p has pair p.
__device__ __forceinline__ void place_experts(RoutedList& r, const ExpertPlaces& places, int num_pairs, int thread) {
    if (thread >= num_pairs || r.first_pair[thread] != thread) return;
    int num_misses = 0, misses_before = 0;
    for (int word = 0; word < kMaxPairs / 32; word++) {
        num_misses += __popc(r.misses[word]);
        if (word < thread / 32) misses_before += __popc(r.misses[word]);
    }
    misses_before += __popc(r.misses[thread / 32] & ((1u << thread % 32) - 1));
    RoutedExpert& expert = r.experts[r.expert_of[thread]];
    place_expert(expert, places, r.slots[expert.expert], misses_before, streamed_shares(places, num_misses));
}

// of_side, side_first and the numbers. Thread i has expert i; threads behind those have a side each, too.
__device__ __forceinline__ void split_sides(RoutedList& r, int thread) {
    const bool is_total = thread >= kMaxPairs && thread < kMaxPairs + kNumSides;
    if (!is_total && thread >= r.num_experts) return;
    const int side = is_total ? thread - kMaxPairs : r.experts[thread].side;
    int index = 0, rows = 0;
    for (int i = 0; i < min(thread, r.num_experts); i++) {
        if (r.experts[i].side != side) continue;
        index++;
        rows += r.experts[i].count;
    }
    if (is_total) {
        r.num_of_side[side] = index;
        r.pairs_of_side[side] = rows;
        return;
    }
    r.of_side[side][index] = static_cast<uint8_t>(thread);
    r.experts[thread].side_first = rows;
}

// The whole list of a window of one row by one warp: every expert has one pair, in the order of the list.
__device__ __forceinline__ void list_one_row(RoutedList& r, const ExpertPlaces& places, int top_k, int lane) {
    const bool listed = lane < top_k;
    const int id = listed ? r.ids[lane] : 0, slot = listed ? r.slots[id] : 0;
    const uint32_t before = (1u << lane) - 1, misses = __ballot_sync(~0u, slot == kAbsent);
    RoutedExpert expert{};
    expert.expert = id;
    expert.first = lane;
    expert.count = 1;
    place_expert(expert, places, slot, __popc(misses & before), streamed_shares(places, __popc(misses)));
#pragma unroll
    for (int side = 0; side < kNumSides; side++) {
        const uint32_t members = __ballot_sync(~0u, listed && expert.side == side);
        if (expert.side == side) expert.side_first = __popc(members & before);
        if (lane == side) r.num_of_side[side] = r.pairs_of_side[side] = __popc(members);
    }
    if (listed) {
        r.experts[lane] = expert;
        r.of_side[expert.side][expert.side_first] = static_cast<uint8_t>(lane);
        r.expert_of[lane] = r.pairs[lane] = lane;
        r.side_place[lane] = expert.side_first;
    }
    if (lane == 0) r.num_experts = top_k;
}

}  // namespace

__device__ void route_rows(RoutedList& r, const Choice& p, const ExpertPlaces& places, int num_rows, int thread, int num_threads) {
    const int warp = thread / 32, num_warps = num_threads / 32, lane = thread % 32, num_pairs = num_rows * p.top_k;
    for (int row = warp; row < num_rows; row += num_warps) {
        const float* logits = p.logits + row * p.num_experts;
        int32_t* ids = r.ids + row * p.top_k;
        if (p.num_experts <= 128)
            choose_row<4>(logits, p.num_experts, p.top_k, ids, lane);
        else
            choose_row<kMaxRoutedExperts / 32>(logits, p.num_experts, p.top_k, ids, lane);
    }
    __syncthreads();
    if (num_rows == 1) {
        if (warp == 0) list_one_row(r, places, p.top_k, lane);
        return __syncthreads();
    }
    group_pairs(r, num_pairs, p.top_k, thread);
    if (thread == 0) {
        int num_experts = 0;
        for (int word = 0; word < kMaxPairs / 32; word++) num_experts += __popc(r.firsts[word]);
        r.num_experts = num_experts;
    }
    __syncthreads();
    place_experts(r, places, num_pairs, thread);
    __syncthreads();
    split_sides(r, thread);
    __syncthreads();
    if (thread < num_pairs) r.side_place[thread] += r.experts[r.expert_of[thread]].side_first;
    __syncthreads();
}

__device__ void weigh_rows(RoutedList& r, const Choice& p, int num_rows, float* gates, int thread, int num_threads) {
    for (int row = thread / 32; row < num_rows; row += num_threads / 32)
        weigh_row(p, p.logits + row * p.num_experts, r.ids + row * p.top_k, gates + row * p.num_experts, r.weights + row * p.top_k,
                  thread % 32);
}

}  // namespace tandem::cuda
