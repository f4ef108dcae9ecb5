#include "cuda_ops/down_window.h"

#include <algorithm>
#include <string>

#include "base/require.h"
#include "cuda_ops/route.cuh"
#include "cuda_ops/stage_ring.cuh"
#include "device/launch.h"
#include "quant/quantise_device.cuh"
#include "quant/row_device.cuh"

namespace tandem::cuda {

namespace {

constexpr int kStageRows = 8;  // at most
constexpr size_t kMostFetchedBytes = 48 * 1024;
constexpr int kSharedPercent = 46;  // of a multiprocessor's, so that this kernel's blocks find room while the one before runs

// What a block knows: its columns of the output and its shared memory.
struct Block {
    __device__ __forceinline__ Block(const DownProblem& p, const DownPlan& plan)
        : shared(device::dynamic_shared()),
          list(*reinterpret_cast<RoutedList*>(shared)),
          first_column(blockIdx.x * plan.block_columns),
          num_columns(min(plan.block_columns, p.down.rows - first_column)),
          sums(reinterpret_cast<float*>(shared + plan.sums)),
          rows(reinterpret_cast<float*>(shared + plan.rows)) {}

    unsigned char* shared;
    RoutedList& list;
    int first_column;
    int num_columns;
    float* sums;
    float* rows;
};

// Experts whose input rows are held in shared memory together: on_card[first_expert .. end_expert).
struct Pass {
    int first_expert;
    int end_expert;
    int first_pair;  // among the card's pairs
    int end_pair;
};

__device__ __forceinline__ Pass pass_from(const RoutedList& list, int first_expert, int held_pairs) {
    Pass pass{first_expert, first_expert, 0, 0};
    if (first_expert < list.num_on_card) pass.first_pair = list.experts[list.on_card[first_expert]].tier_first;
    pass.end_pair = pass.first_pair;
    while (pass.end_expert < list.num_on_card) {
        const int end = pass.end_pair + list.experts[list.on_card[pass.end_expert]].count;
        if (end - pass.first_pair > held_pairs) break;
        pass.end_pair = end;
        pass.end_expert++;
    }
    return pass;
}

// Some weight rows of one expert.
struct Chunk {
    const RoutedExpert* expert;
    int row;  // within the block's columns
    int num_rows;
    device::AlignedSpan bytes;
};

// A warp's share of a pass: every num_warps-th chunk.
class DownItems {
  public:
    __device__ __forceinline__ DownItems(const DownProblem& p, const DownPlan& plan, const Block& block, const Pass& pass, int warp)
        : p_(p), plan_(plan), block_(block), pass_(pass) {
        chunks_ = (block.num_columns + plan.ring_plan.stage_rows - 1) / plan.ring_plan.stage_rows;
        fetched_ = computed_ = warp;
        end_ = (pass.end_expert - pass.first_expert) * chunks_;
    }

    __device__ __forceinline__ bool fetch(device::StagedCopy& copy, uint8_t* stage, int lane) {
        if (fetched_ >= end_) return false;
        const Chunk chunk = at(fetched_);
        copy.start(stage, chunk.bytes.start, chunk.bytes.nbytes, lane);
        fetched_ += plan_.ring_plan.num_warps;
        return true;
    }

    __device__ __forceinline__ void compute(const uint8_t* stage, int lane) {
        const Chunk chunk = at(computed_);
        computed_ += plan_.ring_plan.num_warps;
        const int held = chunk.expert->tier_first - pass_.first_pair;
        quant::RowDots dots{};
        dots.weights = stage + chunk.bytes.offset;
        dots.row_bytes = p_.down.row_bytes;
        dots.num_rows = chunk.num_rows;
        dots.columns = p_.down.columns;
        dots.num_inputs = chunk.expert->count;
        if (plan_.wants_values)
            dots.values = reinterpret_cast<const float*>(block_.shared + plan_.held) + static_cast<int64_t>(held) * p_.down.columns;
        else
            dots.groups = reinterpret_cast<const quant::ActGroup*>(block_.shared + plan_.held) + held * plan_.row_groups;
        dots.table = block_.shared + plan_.table;
        dots.out = block_.rows + chunk.expert->tier_first * plan_.block_columns + chunk.row;
        dots.out_stride = plan_.block_columns;
        dots.input_rows = quant::kAllInputs;
        quant::dot_rows(p_.down.type, dots, lane);
    }

  private:
    __device__ __forceinline__ Chunk at(int item) const {
        const RoutedExpert& expert = block_.list.experts[block_.list.on_card[pass_.first_expert + item / chunks_]];
        const int row = item % chunks_ * plan_.ring_plan.stage_rows,
                  num_rows = min(plan_.ring_plan.stage_rows, block_.num_columns - row);
        const uint8_t* bytes = expert.blob + p_.down.offset + (block_.first_column + row) * p_.down.row_bytes;
        return {&expert, row, num_rows, device::aligned_span(bytes, num_rows * p_.down.row_bytes)};
    }

    const DownProblem& p_;
    const DownPlan& plan_;
    const Block& block_;
    const Pass& pass_;
    int chunks_;  // of one expert
    int fetched_;
    int computed_;
    int end_;
};

// All of `h` into shared memory, many bytes under way at once. A barrier must follow.
__device__ __forceinline__ void fetch_rows(const DownProblem& p, const DownPlan& plan, const Block& block) {
    const int units = p.choice.top_k * p.down.columns / 4;
#pragma unroll 1
    for (int i = threadIdx.x; i < units; i += kWindowThreads)
        device::copy_async16(block.shared + plan.fetched + 16 * i, reinterpret_cast<const float4*>(p.h) + i);
    device::copy_async_commit();
    device::copy_async_wait<0>();
}

// Values at .. at + 7 of a pair's row of `h`; zeros beyond its end.
__device__ __forceinline__ void load_eight(const DownProblem& p, const DownPlan& plan, const Block& block, int pair, int at,
                                           float (&x)[8]) {
    const int width = p.down.columns;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float4 v{};
        if (at + 4 * i < width && plan.fetched != DownPlan::kNotFetched)
            v = *reinterpret_cast<const float4*>(block.shared + plan.fetched + (pair * width + at + 4 * i) * sizeof(float));
        else if (at + 4 * i < width)
            v = __ldcg(reinterpret_cast<const float4*>(p.h + static_cast<int64_t>(pair) * width + at + 4 * i));
        x[4 * i] = v.x;
        x[4 * i + 1] = v.y;
        x[4 * i + 2] = v.z;
        x[4 * i + 3] = v.w;
    }
}

// The rows of a pass from `h` into shared memory, in the form that `down` wants.
__device__ __forceinline__ void hold_rows(const DownProblem& p, const DownPlan& plan, const Block& block, const Pass& pass) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, width = p.down.columns;
#pragma unroll 1
    for (int item = warp; item < p.num_rows * p.choice.top_k * plan.row_groups; item += kWindowWarps) {
        const int pair = item / plan.row_groups, group = item % plan.row_groups, at = group * quant::kSuper + 8 * lane;
        const int place = block.list.tier_place[pair], held = place - pass.first_pair;
        if (!block.list.experts[block.list.expert_of[pair]].blob || held < 0 || place >= pass.end_pair) continue;
        float x[8] = {};
        load_eight(p, plan, block, pair, at, x);
        if (!plan.wants_values) {
            auto* groups = reinterpret_cast<quant::ActGroup*>(block.shared + plan.held) + held * plan.row_groups;
            quant::quantise_super(x, 1.0f, groups[group], lane);
            continue;
        }
        float* values = reinterpret_cast<float*>(block.shared + plan.held) + static_cast<int64_t>(held) * width;
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (at + i < width) values[at + i] = x[i];
    }
}

// Returns when the host has answered the window's post for this layer, or will not any more. One thread calls it.
__device__ __forceinline__ void await_host(const DownProblem& p) {
    const uint32_t sequence = __ldcg(&p.state->posted);
    const bool asks_host = blockIdx.x == 0 || p.polling == Polling::every_block;
    if (!asks_host) {
        while (device::load_acquire_device(&p.state->arrived) != sequence) device::spin_pause();
        return;
    }
    while (device::load_acquire_system(p.host.done) != sequence) {
        if (device::load_acquire_system(p.host.abort) != 0) {
            p.state->voided = 1;
            break;
        }
        device::spin_pause();
    }
    if (blockIdx.x == 0) device::store_release_device(&p.state->arrived, sequence);
}

__device__ __forceinline__ void combine(const DownProblem& p, const DownPlan& plan, const Block& block) {
    const RoutedList& list = block.list;
    for (int i = threadIdx.x; i < p.num_rows * block.num_columns; i += kWindowThreads) {
        const int row = i / block.num_columns, column = i % block.num_columns;
        float sum = 0.0f;
        for (int pair = row * p.choice.top_k; pair < (row + 1) * p.choice.top_k; pair++) {
            const int place = list.tier_place[pair];
            // Volatile: another processor wrote them while this kernel ran.
            const float y = list.experts[list.expert_of[pair]].blob
                                ? block.rows[place * plan.block_columns + column]
                                : *static_cast<const volatile float*>(p.host.rows + static_cast<int64_t>(place) * p.down.rows +
                                                                      block.first_column + column);
            sum = quant::fma(list.weights[pair], y, sum);
        }
        const int64_t at = static_cast<int64_t>(row) * p.down.rows + block.first_column + column;
        p.hidden[at] = quant::add(block.sums[row * plan.block_columns + column], sum);
    }
}

__device__ __forceinline__ void load_hidden(const DownProblem& p, const DownPlan& plan, const Block& block) {
    for (int i = threadIdx.x; i < p.num_rows * block.num_columns; i += kWindowThreads) {
        const int row = i / block.num_columns, column = i % block.num_columns;
        block.sums[row * plan.block_columns + column] =
            __ldcg(p.hidden + static_cast<int64_t>(row) * p.down.rows + block.first_column + column);
    }
}

__global__ void __launch_bounds__(kWindowThreads, 2)
    down_kernel(const __grid_constant__ DownProblem p, const __grid_constant__ DownPlan plan) {
    const Block block(p, plan);
    RoutedList& list = block.list;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    load_slots(list, p.places, p.choice.num_experts, thread, kWindowThreads);
    quant::load_table(p.down.type, block.shared + plan.table, thread, kWindowThreads);
    if (thread == 0) StageRing::init(block.shared + plan.rings, plan.ring_plan);
    route_rows(list, p.choice, p.places, p.num_rows, thread, kWindowThreads);

    StageRing ring(block.shared + plan.rings, plan.ring_plan, warp);
    const bool fetches = warp < plan.ring_plan.num_warps;
    Pass pass = pass_from(list, 0, plan.held_pairs);
    DownItems first_items(p, plan, block, pass, warp);
    if (fetches) ring.fetch(first_items, lane);
    load_hidden(p, plan, block);
    weigh_rows(list, p.choice, p.num_rows, reinterpret_cast<float*>(block.shared + plan.held), thread, kWindowThreads);
    __syncthreads();
    device::wait_prerequisites();
    device::launch_dependents();

    if (plan.fetched != DownPlan::kNotFetched) {
        fetch_rows(p, plan, block);
        __syncthreads();
    }
    hold_rows(p, plan, block, pass);
    __syncthreads();
    if (fetches) ring.run(first_items, lane);
    while (pass.end_expert < list.num_on_card) {
        __syncthreads();
        pass = pass_from(list, pass.end_expert, plan.held_pairs);
        hold_rows(p, plan, block, pass);
        __syncthreads();
        DownItems items(p, plan, block, pass, warp);
        if (fetches) ring.run(items, lane);
    }
    if (list.num_on_host > 0 && thread == 0) await_host(p);
    __syncthreads();
    combine(p, plan, block);
}

}  // namespace

DownPlan plan_down(const DownProblem& p, const CardShape& card) {
    check_routing(p.num_rows, p.choice, p.places);
    check_part(p.down, p.places);
    const size_t row_bytes = input_row_bytes(p.down.type, p.down.columns),
                 num_pairs = static_cast<size_t>(p.num_rows) * p.choice.top_k;
    const size_t gates_bytes = p.num_rows * p.choice.num_experts * sizeof(float);
    DownPlan plan{};
    plan.block_columns = (p.down.rows + card.num_window_blocks() - 1) / card.num_window_blocks();
    plan.num_blocks = (p.down.rows + plan.block_columns - 1) / plan.block_columns;
    plan.wants_values = quant::type_wants_values(p.down.type);
    plan.row_groups = static_cast<int32_t>((p.down.columns + quant::kSuper - 1) / quant::kSuper);
    const int chunks = (plan.block_columns + kStageRows - 1) / kStageRows, stage_rows = (plan.block_columns + chunks - 1) / chunks;
    SharedPieces pieces;
    pieces.take(sizeof(RoutedList));
    plan.table = pieces.take(quant::table_bytes(p.down.type));
    plan.sums = pieces.take(p.num_rows * plan.block_columns * sizeof(float));
    plan.rows = pieces.take(num_pairs * plan.block_columns * sizeof(float));
    // One row: its pairs' rows are few. They share their place with nothing, the copies of the weights are under way already.
    const size_t fetched_bytes = num_pairs * p.down.columns * sizeof(float);
    const bool fetches = p.num_rows == 1 && fetched_bytes <= kMostFetchedBytes && p.down.columns % 4 == 0;
    plan.fetched = fetches ? pieces.take(fetched_bytes) : DownPlan::kNotFetched;
    plan.held = pieces.take(0);
    // All rows at once, beside the kernel before, with rings of two stages if possible; else fewer rows at a time.
    const size_t beside = card.modest_shared_bytes(kSharedPercent);
    for (size_t held = num_pairs; held >= static_cast<size_t>(p.num_rows) && plan.ring_plan.num_stages < 2; held /= 2) {
        const size_t held_bytes = (std::max(held * row_bytes, gates_bytes) + 63) / 64 * 64;
        for (const size_t limit : {beside, card.block_shared_bytes}) {
            if (plan.held + held_bytes > limit || plan.ring_plan.num_stages >= 2) continue;
            const RingPlan rings = plan_rings(limit - plan.held - held_bytes, stage_rows, p.down.row_bytes, 1);
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
    const auto blocks = static_cast<unsigned>(plan.num_blocks);
    device::launch({dim3(blocks), dim3(kWindowThreads), plan.shared_bytes, stream, dependent}, down_kernel, p, plan);
}

}  // namespace tandem::cuda
