// A warp's share of the gate and up products of experts, and what becomes of their results.
#pragma once
#include <algorithm>

#include "cuda_ops/gate_up_window.h"
#include "cuda_ops/route.cuh"
#include "cuda_ops/stage_ring.cuh"
#include "quant/row_device.cuh"

namespace tandem::cuda {

constexpr int kGateUpStageRows = 3;     // of gate, and as many of up, where a warp has several stages
constexpr int kMaxGateUpStageRows = 8;  // where one stage holds all that a warp has
constexpr int kGateUpResults = std::max(kMaxWindowRows * 2 * kGateUpStageRows, 2 * kMaxGateUpStageRows);  // of a stage

// Rows of gate and up with the same numbers, some of one expert.
struct RowPairs {
    const RoutedExpert* expert;
    int row;
    int num_rows;
    device::AlignedSpan gate;
    device::AlignedSpan up;
};

// Rows of all experts, one after the other, for one of `num_shares` warps. Where there are enough, a warp has rows of one expert
// only, so that all its bytes are under way at once.
__device__ __forceinline__ EvenShare share_of_experts(int num_experts, int width, int share, int num_shares) {
    if (num_experts == 0 || num_experts > num_shares) return even_share(num_experts * width, share, num_shares);
    const int each = num_shares / num_experts, expert = share / each;
    if (expert >= num_experts) return {0, 0};
    const EvenShare rows = even_share(width, share - expert * each, each);
    return {expert * width + rows.begin, expert * width + rows.end};
}

// A warp's share.
class GateUpItems {
  public:
    __device__ __forceinline__ GateUpItems(const GateUpProblem& p, const GateUpPlan& plan, const RoutedList& list,
                                           unsigned char* shared, int warp)
        : p_(p), plan_(plan), list_(list), shared_(shared) {
        const EvenShare share =
            share_of_experts(list.num_of_side[kCardSide], p.gate.rows, blockIdx.x * plan.ring_plan.num_warps + warp,
                             plan.num_blocks * plan.ring_plan.num_warps);
        fetched_ = computed_ = share.begin;
        end_ = share.end;
        results_ = reinterpret_cast<float*>(shared + plan.results) + warp * kGateUpResults;
    }

    __device__ __forceinline__ bool fetch(device::StagedCopy& copy, uint8_t* stage, int lane) {
        if (fetched_ >= end_) return false;
        const RowPairs pairs = at(fetched_);
        copy.start(stage, pairs.gate.start, pairs.gate.nbytes, lane);
        copy.start(stage + pairs.gate.nbytes, pairs.up.start, pairs.up.nbytes, lane);
        fetched_ += pairs.num_rows;
        return true;
    }

    __device__ __forceinline__ void compute(const uint8_t* stage, int lane) {
        const RowPairs pairs = at(computed_);
        computed_ += pairs.num_rows;
        multiply(pairs, stage + pairs.gate.offset, stage + pairs.gate.nbytes + pairs.up.offset, lane);
        __syncwarp();
        const int num_rows = pairs.num_rows;
        for (int i = lane; i < pairs.expert->count * num_rows; i += 32) {
            const int input = i / num_rows, row = i % num_rows;
            const float* results = results_ + input * 2 * num_rows + row;
            const int64_t pair = list_.pairs[pairs.expert->first + input];
            p_.h[pair * p_.gate.rows + pairs.row + row] = quant::swiglu_value(results[0], results[num_rows]);
        }
    }

  private:
    __device__ __forceinline__ RowPairs at(int position) const {
        const int width = p_.gate.rows, index = position / width, row = position % width;
        const RoutedExpert& expert = list_.experts[list_.of_side[kCardSide][index]];
        const int num_rows = min(min(plan_.ring_plan.stage_rows, width - row), end_ - position);
        return {&expert, row, num_rows,
                device::aligned_span(expert.blob + p_.gate.offset + row * p_.gate.row_bytes, num_rows * p_.gate.row_bytes),
                device::aligned_span(expert.blob + p_.up.offset + row * p_.up.row_bytes, num_rows * p_.up.row_bytes)};
    }

    // results_[input][gate rows, then up rows]
    __device__ __forceinline__ void multiply(const RowPairs& pairs, const uint8_t* gate, const uint8_t* up, int lane) {
        quant::RowDots dots{};
        dots.weights = gate;
        dots.row_bytes = p_.gate.row_bytes;
        dots.num_rows = pairs.num_rows;
        dots.columns = p_.gate.columns;
        dots.num_inputs = pairs.expert->count;
        set_inputs(dots, plan_.gate_wants_values);
        dots.table = shared_ + plan_.gate_table;
        dots.out = results_;
        dots.out_stride = 2 * pairs.num_rows;
        dots.input_rows = pairs.expert->input_rows;
        const bool in_one = p_.gate.type == p_.up.type && up == gate + pairs.num_rows * p_.gate.row_bytes;
        if (in_one) dots.num_rows *= 2;
        quant::dot_rows(p_.gate.type, dots, lane);
        if (in_one) return;
        dots.weights = up;
        dots.row_bytes = p_.up.row_bytes;
        set_inputs(dots, plan_.up_wants_values);
        dots.table = shared_ + plan_.up_table;
        dots.out = results_ + pairs.num_rows;
        quant::dot_rows(p_.up.type, dots, lane);
    }

    __device__ __forceinline__ void set_inputs(quant::RowDots& dots, bool wants_values) const {
        dots.groups = wants_values ? nullptr : reinterpret_cast<const quant::ActGroup*>(shared_ + plan_.groups);
        dots.values = wants_values ? reinterpret_cast<const float*>(shared_ + plan_.values) : nullptr;
    }

    const GateUpProblem& p_;
    const GateUpPlan& plan_;
    const RoutedList& list_;
    unsigned char* shared_;
    float* results_;
    int fetched_;
    int computed_;
    int end_;
};

}  // namespace tandem::cuda
