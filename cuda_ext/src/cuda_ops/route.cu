#include "cuda_ops/route.cuh"

namespace tandem::cuda {

namespace {

// By the warp that has chosen the row.
__device__ __forceinline__ void mark_row(RoutedList& r, int row, int top_k, int lane) {
    if (lane >= top_k) return;
    const int id = r.ids[row * top_k + lane];
    atomicOr(reinterpret_cast<uint32_t*>(r.rows_of) + id / 4, 1u << (8 * (id % 4) + row));
}

// One of 32 pairs that a warp lists together.
struct ListedPair {
    int id;
    uint32_t rows;    // that chose the expert
    uint32_t before;  // of those, the ones before the pair's row
    int slot;
    bool is_listed;

    __device__ __forceinline__ bool is_first() const { return is_listed && before == 0; }
};

__device__ __forceinline__ ListedPair listed_pair(const RoutedList& r, int pair, int num_pairs, int top_k) {
    if (pair >= num_pairs) return {0, 0, 0, 0, false};
    const int id = r.ids[pair];
    const uint32_t rows = r.rows_of[id];
    return {id, rows, rows & ((1u << pair / top_k) - 1), r.slots[id], true};
}

// Numbers up to kMaxWindowRows, one a lane, as ballots of their bits.
struct LaneCounts {
    static constexpr int kBits = 4;
    static_assert(kMaxWindowRows < 1 << kBits);
    uint32_t bits[kBits];

    __device__ __forceinline__ explicit LaneCounts(int count) {
#pragma unroll
        for (int i = 0; i < kBits; i++) bits[i] = __ballot_sync(~0u, count >> i & 1);
    }
    __device__ __forceinline__ int sum(uint32_t lanes) const {
        int sum = 0;
#pragma unroll
        for (int i = 0; i < kBits; i++) sum += __popc(bits[i] & lanes) << i;
        return sum;
    }
};

// The numbers of the rows, four bits each, rising.
__device__ __forceinline__ uint32_t row_numbers(uint32_t rows) {
    uint32_t numbers = 0;
    int num = 0;
#pragma unroll
    for (int row = 0; row < kMaxWindowRows; row++) {
        if (!(rows >> row & 1)) continue;
        numbers |= static_cast<uint32_t>(row) << 4 * num;
        num++;
    }
    return numbers;
}

__device__ __forceinline__ int num_misses(const RoutedList& r, int num_pairs, int top_k, int lane) {
    int num = 0;
    for (int begin = 0; begin < num_pairs; begin += 32) {
        const ListedPair pair = listed_pair(r, begin + lane, num_pairs, top_k);
        num += __popc(__ballot_sync(~0u, pair.is_first() && pair.slot == kAbsent));
    }
    return num;
}

// The list by one warp, from the marks of all rows.
__device__ __forceinline__ void list_rows(RoutedList& r, const ExpertPlaces& places, int num_pairs, int top_k, int lane) {
    const uint32_t before = (1u << lane) - 1;
    const detail::StreamedShares shares = detail::streamed_shares(r.streamed, num_misses(r, num_pairs, top_k, lane));
    int num_experts = 0, misses = 0, first = 0, experts_of[kNumSides] = {}, pairs_of[kNumSides] = {};
    for (int begin = 0; begin < num_pairs; begin += 32) {
        const ListedPair pair = listed_pair(r, begin + lane, num_pairs, top_k);
        const bool is_first = pair.is_first();
        const uint32_t firsts = __ballot_sync(~0u, is_first), absent = __ballot_sync(~0u, is_first && pair.slot == kAbsent);
        const LaneCounts counts(is_first ? __popc(pair.rows) : 0);
        const int index = num_experts + __popc(firsts & before);
        RoutedExpert expert{};
        expert.expert = pair.id;
        expert.first = first + counts.sum(before);
        expert.count = __popc(pair.rows);
        expert.input_rows = row_numbers(pair.rows);
        detail::place_expert(expert, places, pair.slot, misses + __popc(absent & before), shares);
#pragma unroll
        for (int side = 0; side < kNumSides; side++) {
            const uint32_t members = __ballot_sync(~0u, is_first && expert.side == side);
            if (expert.side == side) {
                expert.side_first = pairs_of[side] + counts.sum(members & before);
                if (is_first) r.of_side[side][experts_of[side] + __popc(members & before)] = static_cast<uint8_t>(index);
            }
            experts_of[side] += __popc(members);
            pairs_of[side] += counts.sum(members);
        }
        if (is_first) {
            r.experts[index] = expert;
            r.index_of[pair.id] = static_cast<uint8_t>(index);
        }
        __syncwarp();
        if (pair.is_listed) {
            const int mine = r.index_of[pair.id], place = __popc(pair.before);
            r.expert_of[begin + lane] = mine;
            r.pairs[r.experts[mine].first + place] = begin + lane;
            r.side_place[begin + lane] = r.experts[mine].side_first + place;
        }
        num_experts += __popc(firsts);
        misses += __popc(absent);
        first += counts.sum(~0u);
    }
#pragma unroll
    for (int side = 0; side < kNumSides; side++) {
        if (lane != side) continue;
        r.num_of_side[side] = experts_of[side];
        r.pairs_of_side[side] = pairs_of[side];
    }
    if (lane == 0) r.num_experts = num_experts;
}

}  // namespace

__device__ void route_rows(RoutedList& r, const Choice& p, const ExpertPlaces& places, int num_rows, int thread, int num_threads) {
    const int warp = thread / 32, num_warps = num_threads / 32, lane = thread % 32;
    for (int i = thread; i < kMaxRoutedExperts / 4; i += num_threads) reinterpret_cast<uint32_t*>(r.rows_of)[i] = 0;
    __syncthreads();
    for (int row = warp; row < num_rows; row += num_warps) {
        ScoreKeys keys = load_keys(p.sums + row * p.num_experts, p.num_experts, lane);
        detail::choose_row(keys, p.num_experts, p.top_k, r.ids + row * p.top_k, lane);
        __syncwarp();
        mark_row(r, row, p.top_k, lane);
    }
    __syncthreads();
    if (warp == 0) list_rows(r, places, num_rows * p.top_k, p.top_k, lane);
    __syncthreads();
}

}  // namespace tandem::cuda
