#include "cuda_ops/route.cuh"

namespace tandem::cuda {

namespace {

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
    detail::place_expert(expert, places, r.slots[expert.expert], misses_before, detail::streamed_shares(r.streamed, num_misses));
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

}  // namespace

__device__ void route_rows(RoutedList& r, const Choice& p, const ExpertPlaces& places, int num_rows, int thread, int num_threads) {
    const int warp = thread / 32, num_warps = num_threads / 32, lane = thread % 32, num_pairs = num_rows * p.top_k;
    for (int row = warp; row < num_rows; row += num_warps) {
        ScoreKeys keys = load_keys(p.sums + row * p.num_experts, p.num_experts, lane);
        detail::choose_row(keys, p.num_experts, p.top_k, r.ids + row * p.top_k, lane);
    }
    __syncthreads();
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

}  // namespace tandem::cuda
