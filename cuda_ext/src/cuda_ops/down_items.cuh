// The down products of experts by one block: a warp's share, and the rows that they take.
#pragma once
#include "cuda_ops/down_window.h"
#include "cuda_ops/route.cuh"
#include "cuda_ops/stage_ring.cuh"
#include "quant/quantise_device.cuh"
#include "quant/row_one.cuh"

namespace tandem::cuda {

// What a block knows: its columns of the output and its shared memory.
struct DownBlock {
    __device__ __forceinline__ DownBlock(const DownProblem& p, const DownPlan& plan)
        : shared(device::dynamic_shared()),
          list(*reinterpret_cast<RoutedList*>(shared)),
          first_column(blockIdx.x * plan.block_columns),
          num_columns(min(plan.block_columns, p.down.rows - first_column)),
          sums(reinterpret_cast<float*>(shared + plan.sums)),
          rows(reinterpret_cast<float*>(shared + plan.rows)),
          row_of(reinterpret_cast<int32_t*>(shared + plan.row_of)) {}

    unsigned char* shared;
    RoutedList& list;
    int first_column;
    int num_columns;
    float* sums;
    float* rows;
    int32_t* row_of;
};

// Experts whose input rows are held in shared memory together: first_expert .. end_expert - 1 of the card's.
struct DownPass {
    int first_expert;
    int end_expert;
    int first_pair;  // among the card's pairs
    int end_pair;
};

template <class T>
__device__ __forceinline__ DownPass pass_from(const RoutedList& list, int first_expert, int held_pairs) {
    if constexpr (quant::kOneRow<T>) {  // one pair an expert
        const int end = min(first_expert + held_pairs, list.num_of_side[kCardSide]);
        return {first_expert, end, first_expert, end};
    }
    DownPass pass{first_expert, first_expert, 0, 0};
    if (first_expert < list.num_of_side[kCardSide])
        pass.first_pair = list.experts[list.of_side[kCardSide][first_expert]].side_first;
    pass.end_pair = pass.first_pair;
    while (pass.end_expert < list.num_of_side[kCardSide]) {
        const int end = pass.end_pair + list.experts[list.of_side[kCardSide][pass.end_expert]].count;
        if (end - pass.first_pair > held_pairs) break;
        pass.end_pair = end;
        pass.end_expert++;
    }
    return pass;
}

// Some weight rows of one expert.
struct DownChunk {
    const RoutedExpert* expert;
    int row;  // within the block's columns
    int num_rows;
    device::AlignedSpan bytes;
    bool is_last;  // of the warp
};

// A warp's share of a pass: every num_warps-th chunk. T: as for quant::dot_window_rows.
template <class T>
class DownItems {
  public:
    __device__ __forceinline__ DownItems(const DownProblem& p, const DownPlan& plan, const DownBlock& block, const DownPass& pass,
                                         int warp)
        : p_(p), plan_(plan), block_(block), pass_(pass), warp_(warp) {}

    __device__ __forceinline__ Fetched fetch(int item, device::StagedCopy& copy, uint8_t* stage, int lane) const {
        const DownChunk chunk = at(item);
        if (chunk.num_rows == 0) return Fetched::none;
        if (is_streamed(*chunk.expert)) await_posts(block_.list, p_.state, p_.layer, lane);
        if (lane == 0) note_of<Note>(stage) = {chunk.expert, chunk.row, chunk.num_rows, chunk.bytes.offset};
        copy.start(stage, chunk.bytes.start, chunk.bytes.nbytes, lane);
        return chunk.is_last ? Fetched::last : Fetched::more;
    }

    __device__ __forceinline__ void compute(const uint8_t* stage, int lane) const {
        const Note chunk = note_of<Note>(stage);
        const int held = chunk.expert->side_first - pass_.first_pair;
        quant::RowDots dots{};
        dots.weights = stage + chunk.offset;
        dots.row_bytes = p_.down.row_bytes;
        dots.num_rows = chunk.num_rows;
        dots.columns = p_.down.columns;
        dots.num_inputs = chunk.expert->count;
        if (plan_.wants_values)
            dots.values = reinterpret_cast<const float*>(block_.shared + plan_.held) + static_cast<int64_t>(held) * p_.down.columns;
        else
            dots.groups = reinterpret_cast<const quant::SharedGroup*>(block_.shared + plan_.held) + held * plan_.row_groups;
        dots.table = block_.shared + plan_.table;
        dots.out = block_.rows + chunk.expert->side_first * plan_.block_columns + chunk.row;
        dots.out_stride = plan_.block_columns;
        dots.input_rows = quant::kAllInputs;
        quant::dot_window_rows<T>(p_.down.type, dots, lane);
    }

    // Every item; after ring.fetch().
    __device__ __forceinline__ void run(StageRing& ring, int lane) const {
        if constexpr (std::is_same_v<T, quant::EachType>)
            quant::with_type(p_.down.type, [&]<class Own>() TANDEM_INLINE_BODY {
                ring.run(DownItems<Own>(p_, plan_, block_, pass_, warp_), lane);
            });
        else
            ring.run(*this, lane);
    }

  private:
    struct Note {
        const RoutedExpert* expert;
        int row;
        int num_rows;
        uint32_t offset;  // of the rows in the stage
    };

    // Beyond the warp's last item there are no rows.
    __device__ __forceinline__ DownChunk at(int item) const {
        // The last block may have fewer columns, and so chunks of an expert, than the others.
        const int stage_rows = plan_.ring_plan.stage_rows, num_warps = plan_.ring_plan.num_warps,
                  chunks = small_quotient(block_.num_columns + stage_rows - 1, stage_rows), chunk = item * num_warps + warp_,
                  index = small_quotient(chunk, chunks), num_experts = pass_.end_expert - pass_.first_expert;
        if (index >= num_experts) return {};
        const RoutedExpert& expert = block_.list.experts[block_.list.of_side[kCardSide][pass_.first_expert + index]];
        const int row = (chunk - index * chunks) * stage_rows, num_rows = min(stage_rows, block_.num_columns - row);
        return {&expert, row, num_rows, span_of(expert, p_.down, block_.first_column + row, num_rows),
                chunk + num_warps >= num_experts * chunks};
    }

    const DownProblem& p_;
    const DownPlan& plan_;
    const DownBlock& block_;
    const DownPass& pass_;
    int warp_;
};

// A super-block of a pair's row of `h`: values 8 * lane .. 8 * lane + 7, zeros beyond the row's end.
struct HeldItem {
    int held;  // the pair's place among those held; negative where it is not
    int group;
    float x[8];
};

__device__ __forceinline__ HeldItem load_item(const DownProblem& p, const DownPlan& plan, const DownBlock& block,
                                              const DownPass& pass, int item, int lane) {
    const int width = p.down.columns, pair = small_quotient(item, plan.row_groups), group = item - pair * plan.row_groups,
              at = group * quant::kSuper + 8 * lane, place = block.list.side_place[pair];
    HeldItem out{-1, group, {}};
    if (!block.list.experts[block.list.expert_of[pair]].blob || place < pass.first_pair || place >= pass.end_pair) return out;
    out.held = place - pass.first_pair;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (at + 4 * i >= width) continue;
        const float4 v = __ldcg(reinterpret_cast<const float4*>(p.h + static_cast<int64_t>(pair) * width + at + 4 * i));
        out.x[4 * i] = v.x;
        out.x[4 * i + 1] = v.y;
        out.x[4 * i + 2] = v.z;
        out.x[4 * i + 3] = v.w;
    }
    return out;
}

// The rows of a pass from `h` into shared memory, in the form that `down` wants; a warp's next item is on its way meanwhile.
// `num_pairs`: of the window.
__device__ __forceinline__ void hold_rows(const DownProblem& p, const DownPlan& plan, const DownBlock& block, const DownPass& pass,
                                          int num_pairs) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, width = p.down.columns;
    const int num_items = num_pairs * plan.row_groups, num_warps = static_cast<int>(blockDim.x) / 32;
    HeldItem next{-1, 0, {}};
    if (warp < num_items) next = load_item(p, plan, block, pass, warp, lane);
#pragma unroll 1
    for (int item = warp; item < num_items; item += num_warps) {
        const HeldItem now = next;
        if (item + num_warps < num_items) next = load_item(p, plan, block, pass, item + num_warps, lane);
        if (now.held < 0) continue;
        if (!plan.wants_values) {
            auto* groups = reinterpret_cast<quant::SharedGroup*>(block.shared + plan.held) + now.held * plan.row_groups;
            quant::quantise_super(now.x, 1.0f, groups[now.group], lane);
            continue;
        }
        float* values = reinterpret_cast<float*>(block.shared + plan.held) + static_cast<int64_t>(now.held) * width;
        const int at = now.group * quant::kSuper + 8 * lane;
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (at + i < width) values[at + i] = now.x[i];
    }
}

// Everything from the first rows held on: fills block.rows with the rows of all pairs of the card. `ring` has begun to fetch
// `items`, those of `pass`, if this warp `fetches`. A barrier must follow.
template <class T>
__device__ __forceinline__ void multiply_down(const DownProblem& p, const DownPlan& plan, const DownBlock& block, DownPass& pass,
                                              StageRing& ring, const DownItems<T>& items, bool fetches, int num_pairs) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    while (true) {
        hold_rows(p, plan, block, pass, num_pairs);
        __syncthreads();
        if (fetches) items.run(ring, lane);
        if (pass.end_expert >= block.list.num_of_side[kCardSide]) return;
        __syncthreads();
        pass = pass_from<T>(block.list, pass.end_expert, plan.held_pairs);
        if (!fetches) continue;
        ring.restart(lane);
        ring.fetch(items, lane);
    }
}

}  // namespace tandem::cuda
