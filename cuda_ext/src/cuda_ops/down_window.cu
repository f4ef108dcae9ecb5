#include "cuda_ops/down_window.h"

#include <algorithm>
#include <string>

#include "base/require.h"
#include "cuda_ops/down_items.cuh"
#include "device/launch.h"

namespace tandem::cuda {

namespace {

constexpr int kStageRows = 8;       // at most
constexpr int kSharedPercent = 40;  // of a multiprocessor's, so that this kernel's blocks find room while the one before runs

// Returns when a source has answered the window's post for this layer, or will not any more. One thread calls it.
__device__ __forceinline__ void await_rows(const DownProblem& p, int source) {
    const uint32_t sequence = __ldcg(&p.state->posted[source]);
    const MissPost& post = p.posts[source];
    const bool asks = blockIdx.x == 0 || p.polling == Polling::every_block;
    if (!asks) {
        while (device::load_acquire_device(&p.state->arrived[source]) != sequence) device::spin_pause();
        return;
    }
    bool aborted = false;
    while (!aborted && device::load_acquire_system(post.done) != sequence) {
        aborted = device::load_acquire_system(&p.words->abort) != 0;
        device::spin_pause();
    }
    const bool computed =
        !aborted && *static_cast<const volatile uint32_t*>(post.status) == static_cast<uint32_t>(link::Status::computed);
    if (!computed) p.state->voided = 1;
    if (blockIdx.x == 0) device::store_release_device(&p.state->arrived[source], sequence);
}

// Uses of the experts, and rows by tier; one block calls it.
__device__ void count_uses(const DownProblem& p, const RoutedList& list) {
    const int thread = threadIdx.x;
    if (thread >= list.num_experts) return;
    const RoutedExpert& expert = list.experts[thread];
    if (p.uses) atomicAdd(p.uses + expert.expert, static_cast<uint32_t>(expert.count));
    if (p.tier_rows) atomicAdd(p.tier_rows + expert.tier, static_cast<unsigned long long>(expert.count));
}

// The weights of the routed lists, as soon as gate_up_window, which still runs, has told 1 / rms. All its blocks are there before
// the first of this kernel, so that it does tell.
__device__ __forceinline__ void weigh_when_normed(RoutedList& list, const DownProblem& p, int thread) {
    const int row = thread / 32, lane = thread % 32;
    if (row >= p.num_rows) return;
    uint64_t normed = 0;
    if (lane == 0)
        while ((normed = device::load_word_device(p.state->normed + row)) >> 32 <= static_cast<uint64_t>(p.layer))
            device::spin_pause();
    weigh_row(list, p.choice, row, quant::bits_float(__shfl_sync(~0u, static_cast<uint32_t>(normed), 0)), lane);
}

// Where a side's rows begin among those of the block: the card's first, then those of the sources.
__device__ __forceinline__ int first_row_of(const RoutedList& list, int side) {
    if (side == kCardSide) return 0;
    int first = list.pairs_of_side[kCardSide];
    for (int source = 0; source < side; source++) first += list.pairs_of_side[source];
    return first;
}

// The rows that others have computed, into block.rows; all at once, since each trip to the host's memory takes longer than the
// combination.
__device__ __forceinline__ void load_others(const DownProblem& p, const DownPlan& plan, const DownBlock& block) {
    for (int source = 0; source < kNumSources; source++) {
        const int num_rows = block.list.pairs_of_side[source], first = first_row_of(block.list, source);
        for (int i = threadIdx.x; i < num_rows * block.num_columns; i += static_cast<int>(blockDim.x)) {
            const int row = small_quotient(i, block.num_columns), column = i - row * block.num_columns;
            // Volatile: another processor wrote them while this kernel ran.
            block.rows[(first + row) * plan.block_columns + column] = *static_cast<const volatile float*>(
                p.posts[source].rows + static_cast<int64_t>(row) * p.down.rows + block.first_column + column);
        }
    }
}

// Before the combination, and a barrier between.
__device__ __forceinline__ void place_rows(const DownBlock& block, int num_pairs) {
    const RoutedList& list = block.list;
    for (int pair = static_cast<int>(threadIdx.x); pair < num_pairs; pair += static_cast<int>(blockDim.x))
        block.row_of[pair] = first_row_of(list, list.experts[list.expert_of[pair]].side) + list.side_place[pair];
}

__device__ __forceinline__ void combine(const DownProblem& p, const DownPlan& plan, const DownBlock& block) {
    const RoutedList& list = block.list;
    for (int i = threadIdx.x; i < p.num_rows * block.num_columns; i += static_cast<int>(blockDim.x)) {
        const int row = small_quotient(i, block.num_columns), column = i - row * block.num_columns;
        float sum = 0.0f;
#pragma unroll 4
        for (int pair = row * p.choice.top_k; pair < (row + 1) * p.choice.top_k; pair++) {
            sum = quant::fma(list.weights[pair], block.rows[block.row_of[pair] * plan.block_columns + column], sum);
        }
        const int64_t at = static_cast<int64_t>(row) * p.down.rows + block.first_column + column;
        p.hidden[at] = quant::add(block.sums[row * plan.block_columns + column], sum);
    }
}

__device__ __forceinline__ void load_hidden(const DownProblem& p, const DownPlan& plan, const DownBlock& block) {
    for (int i = threadIdx.x; i < p.num_rows * block.num_columns; i += static_cast<int>(blockDim.x)) {
        const int row = small_quotient(i, block.num_columns), column = i - row * block.num_columns;
        block.sums[row * plan.block_columns + column] =
            __ldcg(p.hidden + static_cast<int64_t>(row) * p.down.rows + block.first_column + column);
    }
}

template <class T, int num_threads>
__global__ void __launch_bounds__(num_threads, kBlocksOf<T, num_threads>)
    down_kernel(const __grid_constant__ DownProblem p, const __grid_constant__ DownPlan plan) {
    const DownBlock block(p, plan);
    RoutedList& list = block.list;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    load_slots(list, p.places, p.choice.num_experts, thread, num_threads);
    if (quant::table_bytes(p.down.type) > 0) quant::load_table(p.down.type, block.shared + plan.table, thread, num_threads);
    if constexpr (quant::kOneRow<T>) {
        __syncthreads();
        if (warp == 0) {
            ScoreKeys keys = load_keys(p.choice.sums, p.choice.num_experts, lane);
            route_one_row(list, p.choice, p.places, keys, lane);
        }
        __syncthreads();
    } else {
        route_rows(list, p.choice, p.places, p.num_rows, thread, num_threads);
    }

    StageRing ring(block.shared + plan.rings, plan.ring_plan, warp, lane);
    const bool fetches = warp < plan.ring_plan.num_warps;
    DownPass pass = pass_from<T>(list, 0, plan.held_pairs);
    const DownItems<T> items(p, plan, block, pass, warp);
    if (fetches) ring.fetch(items, lane);
    load_hidden(p, plan, block);
    place_rows(block, p.num_rows * p.choice.top_k);
    if (blockIdx.x == 0) count_uses(p, list);
    weigh_when_normed(list, p, thread);
    device::wait_prerequisites();
    if (!p.leaves_room) device::launch_dependents();

    multiply_down(p, plan, block, pass, ring, items, fetches, p.num_rows * p.choice.top_k);
    if (lane == 0 && warp < kNumSources && list.num_of_side[warp] > 0) await_rows(p, warp);
    __syncthreads();
    if (list.asks_others()) {
        load_others(p, plan, block);
        __syncthreads();
    }
    if (p.leaves_room) device::launch_dependents();
    combine(p, plan, block);
}

template <class T>
struct DownInstance {
    static constexpr auto kernel = down_kernel<T, kWindowThreads>;
};

int threads_for(const DownProblem& p) {
    return p.num_rows > 1 && p.leaves_room ? kRoomyThreads : kWindowThreads;
}

auto kernel_for(const DownProblem& p) {
    if (p.num_rows == 1) return quant::kernel_of<DownInstance>(p.down.type);
    return p.leaves_room ? down_kernel<quant::AnyType, kRoomyThreads> : down_kernel<quant::AnyType, kWindowThreads>;
}

}  // namespace

DownPlan plan_down(const DownProblem& p, const CardShape& card) {
    check_routing(p.num_rows, p.choice);
    check_part(p.down, p.places);
    const size_t row_bytes = input_row_bytes(p.down.type, p.down.columns),
                 num_pairs = static_cast<size_t>(p.num_rows) * p.choice.top_k;
    DownPlan plan{};
    plan.block_columns = (p.down.rows + card.num_window_blocks() - 1) / card.num_window_blocks();
    plan.num_blocks = (p.down.rows + plan.block_columns - 1) / plan.block_columns;
    plan.wants_values = quant::type_wants_values(p.down.type);
    plan.row_groups = static_cast<int32_t>((p.down.columns + quant::kSuper - 1) / quant::kSuper);
    const int chunks = (plan.block_columns + kStageRows - 1) / kStageRows, stage_rows = (plan.block_columns + chunks - 1) / chunks;
    const int num_warps = threads_for(p) / 32;
    // One stage is enough where a warp has one chunk.
    const int wanted_stages = p.num_rows == 1 && p.choice.top_k * chunks <= num_warps ? 1 : 2;
    SharedPieces pieces;
    pieces.take(sizeof(RoutedList));
    plan.table = pieces.take(quant::table_bytes(p.down.type));
    plan.sums = pieces.take(p.num_rows * plan.block_columns * sizeof(float));
    plan.rows = pieces.take(num_pairs * plan.block_columns * sizeof(float));
    plan.row_of = pieces.take(num_pairs * sizeof(int32_t));
    plan.held = pieces.take(0);
    // All rows at once, with rings of two stages if possible; else fewer rows at a time. One row fits beside the kernel before.
    const size_t beside = card.modest_shared_bytes(kSharedPercent), most = p.leaves_room ? beside : card.block_shared_bytes;
    for (size_t held = num_pairs; held >= static_cast<size_t>(p.num_rows) && plan.ring_plan.num_stages < wanted_stages; held /= 2) {
        const size_t held_bytes = (held * row_bytes + 63) / 64 * 64;
        for (const size_t limit : {p.num_rows == 1 ? beside : most, most}) {
            if (plan.held + held_bytes > limit || plan.ring_plan.num_stages >= wanted_stages) continue;
            const RingPlan rings =
                plan_rings(limit - plan.held - held_bytes, {num_warps, wanted_stages, stage_rows}, staged_rows(p.down));
            if (rings.num_warps == 0) continue;
            plan.held_pairs = static_cast<int32_t>(held);
            plan.rings = plan.held + static_cast<uint32_t>(held_bytes);
            plan.ring_plan = rings;
        }
    }
    require(plan.ring_plan.num_warps > 0, "down rows of " + std::to_string(p.down.row_bytes) + " bytes for " +
                                              std::to_string(num_pairs) + " pairs do not fit the " +
                                              std::to_string(card.block_shared_bytes) + " bytes of shared memory");
    plan.shared_bytes = plan.rings + plan.ring_plan.nbytes;
    return plan;
}

void down_window(const DownProblem& p, const CardShape& card, bool dependent, cudaStream_t stream) {
    const DownPlan plan = plan_down(p, card);
    const auto blocks = static_cast<unsigned>(plan.num_blocks), threads = static_cast<unsigned>(threads_for(p));
    device::launch({dim3(blocks), dim3(threads), plan.shared_bytes, stream, dependent}, kernel_for(p), p, plan);
}

}  // namespace tandem::cuda
