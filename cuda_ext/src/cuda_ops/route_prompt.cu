#include "cuda_ops/route_prompt.h"

#include "cache/tier.h"
#include "cuda_ops/gates.cuh"
#include "cuda_ops/tile_prompt.h"
#include "device/launch.h"
#include "device/primitives.cuh"
#include "quant/arithmetic.h"

namespace tandem::cuda {

namespace {

constexpr uint32_t kAll = ~0u;

// ---- choice: a warp has a row ----

constexpr int kChoiceWarps = 4;

// ids[k] of the routed list in lane k; `keys` of experts lane + 32 i are used up.
template <int per_lane>
__device__ int choose(uint32_t (&keys)[per_lane], int top_k, int lane) {
    int chosen = 0;
    for (int k = 0; k < top_k; k++) {
        uint32_t best = 0;
#pragma unroll
        for (int i = 0; i < per_lane; i++) best = max(best, keys[i]);
        best = __reduce_max_sync(kAll, best);
        uint32_t lowest = 0;  // of the experts with that key, counted from the end
#pragma unroll
        for (int i = 0; i < per_lane; i++)
            if (keys[i] == best) lowest = max(lowest, static_cast<uint32_t>(kMaxPromptExperts - (lane + 32 * i)));
        const int id = kMaxPromptExperts - static_cast<int>(__reduce_max_sync(kAll, lowest));
#pragma unroll
        for (int i = 0; i < per_lane; i++)
            if (id == lane + 32 * i) keys[i] = 0;
        if (lane == k) chosen = id;
    }
    return chosen;
}

template <int per_lane>
__global__ void __launch_bounds__(32 * kChoiceWarps) choose_kernel(const __grid_constant__ RoutePromptProblem p, int num_rows) {
    const int lane = threadIdx.x % 32, row = blockIdx.x * kChoiceWarps + threadIdx.x / 32, num_experts = p.routed.num_experts;
    if (row >= num_rows) return;
    const int64_t* sums = p.sums + static_cast<size_t>(row) * num_experts;
    uint32_t keys[per_lane];
#pragma unroll
    for (int i = 0; i < per_lane; i++) keys[i] = lane + 32 * i < num_experts ? score_key(load_sum(sums + lane + 32 * i)) : 0;
    const int top_k = p.routed.top_k, id = choose(keys, top_k, lane);
    const float weight = list_weight(sums, num_experts, top_k, p.gating, p.renormalise, p.inverse[row], id, lane);
    if (lane >= top_k) return;
    const size_t pair = static_cast<size_t>(row) * top_k + lane;
    p.routed.ids[pair] = id;
    p.routed.weights[pair] = quant::mul(weight, p.scale);
}

// ---- order: a block has an expert, each of its warps a range of the pairs ----

constexpr int kOrderWarps = 8;

struct PairCounts {
    int before;  // pairs of experts with lower ids
    int here;    // pairs of the expert
};

__device__ PairCounts count_pairs(const int32_t* ids, int begin, int end, int expert, int lane) {
    PairCounts counts{};
#pragma unroll 4
    for (int at = begin; at < end; at += 32) {
        const int id = at + lane < end ? ids[at + lane] : kMaxPromptExperts;
        counts.before += __popc(__ballot_sync(kAll, id < expert));
        counts.here += __popc(__ballot_sync(kAll, id == expert));
    }
    return counts;
}

__device__ void place_pairs(const RoutedPrompt& routed, int begin, int end, int expert, int place, int lane) {
#pragma unroll 4
    for (int at = begin; at < end; at += 32) {
        const bool mine = at + lane < end && routed.ids[at + lane] == expert;
        const uint32_t ballot = __ballot_sync(kAll, mine);
        if (mine) {
            const int here = place + __popc(ballot & ((1u << lane) - 1));
            routed.order[here] = at + lane;
            routed.places[at + lane] = here;
        }
        place += __popc(ballot);
    }
}

__global__ void __launch_bounds__(32 * kOrderWarps) order_kernel(RoutedPrompt routed, int num_pairs) {
    __shared__ PairCounts counts[kOrderWarps];
    const int expert = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int range = (num_pairs + 32 * kOrderWarps - 1) / (32 * kOrderWarps) * 32;
    const int begin = min(warp * range, num_pairs), end = min(begin + range, num_pairs);
    const PairCounts own = count_pairs(routed.ids, begin, end, expert, lane);
    if (lane == 0) counts[warp] = own;
    __syncthreads();
    int first = 0, count = 0, place = 0;
    for (int i = 0; i < kOrderWarps; i++) {
        first += counts[i].before;
        if (i < warp) place += counts[i].here;
        count += counts[i].here;
    }
    place_pairs(routed, begin, end, expert, first + place, lane);
    if (threadIdx.x == 0) {
        routed.firsts[expert] = first;
        routed.counts[expert] = count;
    }
}

// ---- lists: one warp ----

// Sum over lanes 0 .. lane.
__device__ __forceinline__ int inclusive_sum(int value, int lane) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int below = __shfl_sync(kAll, value, (lane - step) & 31);
        if (lane >= step) value += below;
    }
    return value;
}

__device__ __forceinline__ int tiles_of(int count) {
    return (count + kTileRows - 1) / kTileRows;
}

// Appends the tiles of one expert per lane (count 0: none); returns how many tiles there are then.
__device__ int append_tiles(RowTile* tiles, int num_tiles, int index, int count, int lane) {
    const int own = tiles_of(count), sum = inclusive_sum(own, lane);
    for (int i = 0; i < own; i++) tiles[num_tiles + sum - own + i] = {index, i * kTileRows};
    return num_tiles + __shfl_sync(kAll, sum, 31);
}

__global__ void __launch_bounds__(32) list_tiles_kernel(ExpertList list) {
    const int lane = threadIdx.x, num_experts = *list.num_experts;
    int num_tiles = 0;
    for (int begin = 0; begin < num_experts; begin += 32) {
        const int index = begin + lane;
        num_tiles = append_tiles(list.tiles, num_tiles, index, index < num_experts ? list.experts[index].count : 0, lane);
    }
    if (lane == 0) *list.num_tiles = num_tiles;
}

struct TierRows {
    int own, streamed;
};

// Experts begin .. begin + 31: those with a slot are appended to the list.
__device__ void list_residents(const RoutePromptProblem& p, int begin, int& num_experts, int& num_tiles, TierRows& rows, int lane) {
    const int expert = begin + lane;
    const bool exists = expert < p.routed.num_experts;
    const int count = exists ? p.routed.counts[expert] : 0, slot = exists ? p.residency.slots[expert] : -1;
    const bool listed = count > 0 && slot >= 0;
    const uint32_t ballot = __ballot_sync(kAll, listed);
    const int index = num_experts + __popc(ballot & ((1u << lane) - 1));
    if (listed)
        p.resident.experts[index] = {p.residency.slot_base + slot * p.residency.blob_bytes, expert, p.routed.firsts[expert], count};
    if (count > 0 && p.residency.uses) p.residency.uses[expert] += count;
    (slot >= 0 ? rows.own : rows.streamed) += count;
    num_tiles = append_tiles(p.resident.tiles, num_tiles, index, listed ? count : 0, lane);
    num_experts += __popc(ballot);
}

__global__ void __launch_bounds__(32) list_residents_kernel(const __grid_constant__ RoutePromptProblem p) {
    const int lane = threadIdx.x;
    int num_experts = 0, num_tiles = 0;
    TierRows rows{};
    for (int begin = 0; begin < p.routed.num_experts; begin += 32) list_residents(p, begin, num_experts, num_tiles, rows, lane);
    const int own = __reduce_add_sync(kAll, rows.own), streamed = __reduce_add_sync(kAll, rows.streamed);
    if (lane != 0) return;
    *p.resident.num_experts = num_experts;
    *p.resident.num_tiles = num_tiles;
    if (p.residency.tier_rows) {
        p.residency.tier_rows[static_cast<int>(Tier::own)] += own;
        p.residency.tier_rows[static_cast<int>(Tier::streamed)] += streamed;
    }
}

template <int per_lane>
void launch_choice(const RoutePromptProblem& problem, int num_rows, cudaStream_t stream) {
    const dim3 grid((num_rows + kChoiceWarps - 1) / kChoiceWarps);
    device::launch({grid, dim3(32 * kChoiceWarps), 0, stream}, choose_kernel<per_lane>, problem, num_rows);
}

}  // namespace

void route_prompt(const RoutePromptProblem& problem, int num_rows, cudaStream_t stream) {
    const RoutedPrompt& routed = problem.routed;
    require(routed.num_experts <= kMaxPromptExperts && routed.top_k >= 1 &&
                routed.top_k <= std::min(kMaxPromptTopK, routed.num_experts),
            "cannot route to " + std::to_string(routed.top_k) + " of " + std::to_string(routed.num_experts) + " experts");
    if (num_rows == 0) return;
    if (routed.num_experts <= 128)
        launch_choice<4>(problem, num_rows, stream);
    else if (routed.num_experts <= 512)
        launch_choice<16>(problem, num_rows, stream);
    else
        launch_choice<32>(problem, num_rows, stream);
    device::launch({dim3(routed.num_experts), dim3(32 * kOrderWarps), 0, stream}, order_kernel, routed, num_rows * routed.top_k);
    device::launch({dim3(1), dim3(32), 0, stream}, list_residents_kernel, problem);
}

void list_tiles_prompt(const ExpertList& list, cudaStream_t stream) {
    device::launch({dim3(1), dim3(32), 0, stream}, list_tiles_kernel, list);
}

}  // namespace tandem::cuda
