// A warp's share of the gate and up products of experts, and what becomes of their results.
#pragma once
#include <algorithm>

#include "cuda_ops/gate_up_window.h"
#include "cuda_ops/route.cuh"
#include "cuda_ops/stage_ring.cuh"
#include "quant/row_one.cuh"

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

// A place among the rows of all experts of the card, one expert after the other.
struct ExpertRow {
    int index;  // of the card's experts
    int row;

    __device__ __forceinline__ void advance(int num_rows, int width) {
        row += num_rows;
        if (row < width) return;
        row = 0;
        index++;
    }
};

struct ShareOfExperts {
    ExpertRow begin;
    int num_rows;
};

// What one of `num_shares` warps has. Where there are enough, it has rows of one expert only, so that all its bytes are under way
// at once.
__device__ __forceinline__ ShareOfExperts share_of_experts(int num_experts, int width, int share, int num_shares) {
    if (num_experts == 0) return {{0, 0}, 0};
    if (num_experts > num_shares) {
        const int all = num_experts * width, each = all / num_shares;
        const EvenShare rows = share_of(each, all - each * num_shares, share);
        return {{rows.begin / width, rows.begin % width}, rows.end - rows.begin};
    }
    const int each = small_quotient(num_shares, num_experts), expert = small_quotient(share, each);
    if (expert >= num_experts) return {{0, 0}, 0};
    const EvenShare rows = even_share(width, share - expert * each, each);
    return {{expert, rows.begin}, rows.end - rows.begin};
}

// A warp's share. kOneRow: of a window of one row.
template <bool kOneRow>
class GateUpItems {
  public:
    __device__ __forceinline__ GateUpItems(const GateUpProblem& p, const GateUpPlan& plan, const RoutedList& list,
                                           unsigned char* shared, int warp)
        : p_(p), plan_(plan), list_(list), shared_(shared) {
        const ShareOfExperts share =
            share_of_experts(list.num_of_side[kCardSide], p.gate.rows, blockIdx.x * plan.ring_plan.num_warps + warp,
                             plan.num_blocks * plan.ring_plan.num_warps);
        fetched_ = computed_ = share.begin;
        to_fetch_ = to_compute_ = share.num_rows;
        results_ = reinterpret_cast<float*>(shared + plan.results) + warp * kGateUpResults;
    }

    __device__ __forceinline__ bool fetch(device::StagedCopy& copy, uint8_t* stage, int lane) {
        if (to_fetch_ == 0) return false;
        const RowPairs pairs = at(fetched_, to_fetch_);
        copy.start(stage, pairs.gate.start, pairs.gate.nbytes, lane);
        copy.start(stage + pairs.gate.nbytes, pairs.up.start, pairs.up.nbytes, lane);
        fetched_.advance(pairs.num_rows, p_.gate.rows);
        to_fetch_ -= pairs.num_rows;
        return true;
    }

    __device__ __forceinline__ void compute(const uint8_t* stage, int lane) {
        const RowPairs pairs = at(computed_, to_compute_);
        computed_.advance(pairs.num_rows, p_.gate.rows);
        to_compute_ -= pairs.num_rows;
        multiply(pairs, stage + pairs.gate.offset, stage + pairs.gate.nbytes + pairs.up.offset, lane);
        __syncwarp();
        const int num_rows = pairs.num_rows;
        const int num_inputs = kOneRow ? 1 : pairs.expert->count;
        for (int i = lane; i < num_inputs * num_rows; i += 32) {
            const int input = kOneRow ? 0 : small_quotient(i, num_rows), row = i - input * num_rows;
            const float* results = results_ + input * 2 * num_rows + row;
            const int64_t pair = list_.pairs[pairs.expert->first + input];
            p_.h[pair * p_.gate.rows + pairs.row + row] = quant::swiglu_value(results[0], results[num_rows]);
        }
    }

  private:
    // At most `num_left` rows from there on.
    __device__ __forceinline__ RowPairs at(const ExpertRow& place, int num_left) const {
        const int row = place.row, num_rows = min(min(plan_.ring_plan.stage_rows, p_.gate.rows - row), num_left);
        const RoutedExpert& expert = list_.experts[list_.of_side[kCardSide][place.index]];
        return {&expert, row, num_rows, span_of(expert.blob, p_.gate, row, num_rows), span_of(expert.blob, p_.up, row, num_rows)};
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
        quant::Type type = p_.gate.type;
#pragma unroll 1
        for (int part = 0; part < (in_one ? 1 : 2); part++) {
            if (part == 1) {
                type = p_.up.type;
                dots.weights = up;
                dots.row_bytes = p_.up.row_bytes;
                set_inputs(dots, plan_.up_wants_values);
                dots.table = shared_ + plan_.up_table;
                dots.out = results_ + pairs.num_rows;
            }
            quant::dot_window_rows<kOneRow>(type, dots, lane);
        }
    }

    __device__ __forceinline__ void set_inputs(quant::RowDots& dots, bool wants_values) const {
        dots.groups = wants_values ? nullptr : reinterpret_cast<const quant::SharedGroup*>(shared_ + plan_.groups);
        dots.values = wants_values ? reinterpret_cast<const float*>(shared_ + plan_.values) : nullptr;
    }

    const GateUpProblem& p_;
    const GateUpPlan& plan_;
    const RoutedList& list_;
    unsigned char* shared_;
    float* results_;
    ExpertRow fetched_;
    ExpertRow computed_;
    int to_fetch_;  // rows
    int to_compute_;
};

}  // namespace tandem::cuda
