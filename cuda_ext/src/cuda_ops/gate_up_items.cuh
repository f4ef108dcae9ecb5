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
    bool is_last;  // of the warp
};

// Rows of the card's experts, one expert after the other, that one warp has yet to fetch.
struct ShareOfExperts {
    int expert;  // of the first row, among the card's
    int row;
    int num_rows;
};

// The first stage of a warp where each expert of the list lies in a slot of the card: all but the expert's address is known before
// the list is.
struct FirstStage {
    RowPairs pairs;  // without the expert; spans count from its address
    int expert;      // of the list
};

// What one of `num_shares` warps has. Where there are enough, it has rows of one expert only, so that all its bytes are under way
// at once.
__device__ __forceinline__ ShareOfExperts share_of_experts(int num_experts, int width, int share, int num_shares) {
    if (num_experts == 0) return {0, 0, 0};
    if (num_experts > num_shares) {
        const int all = num_experts * width, each = all / num_shares;
        const EvenShare rows = share_of(each, all - each * num_shares, share);
        return {rows.begin / width, rows.begin % width, rows.end - rows.begin};
    }
    const int each = small_quotient(num_shares, num_experts), expert = small_quotient(share, each);
    if (expert >= num_experts) return {0, 0, 0};
    const EvenShare rows = even_share(width, share - expert * each, each);
    return {expert, rows.begin, rows.end - rows.begin};
}

// A warp's share, which lies in shared memory. T: as for quant::dot_window_rows.
template <class T>
class GateUpItems {
  public:
    __device__ __forceinline__ GateUpItems(const GateUpProblem& p, const GateUpPlan& plan, const RoutedList& list,
                                           unsigned char* shared, int warp)
        : p_(p), plan_(plan), list_(list), shared_(shared), warp_(warp) {}

    // Before the first fetch(). `num_experts`: how many of the list the card computes.
    __device__ __forceinline__ void take_share(int num_experts, int lane) const {
        const RingPlan& rings = plan_.ring_plan;
        if (lane == 0)
            share() = share_of_experts(num_experts, p_.gate.rows, blockIdx.x * rings.num_warps + warp_,
                                       plan_.num_blocks * rings.num_warps);
        __syncwarp();
    }

    // Before fetch_first(), after take_share() for all of the list.
    __device__ __forceinline__ void plan_first(int lane) const {
        if (lane != 0) return;
        const ShareOfExperts& mine = share();
        const int here = min(p_.gate.rows - mine.row, mine.num_rows), num_rows = min(here, plan_.ring_plan.stage_rows);
        const RoutedExpert at_zero{};
        first() = {{nullptr, mine.row, num_rows, span_of(at_zero, p_.gate, mine.row, num_rows),
                    span_of(at_zero, p_.up, mine.row, num_rows), num_rows == mine.num_rows},
                   mine.expert};
    }

    // fetch() of the first item, in a few instructions; where every expert of the list lies in a slot.
    __device__ __forceinline__ void fetch_first(const StageRing& ring, int lane) const {
        RowPairs pairs = first().pairs;
        pairs.expert = list_.experts + first().expert;
        pairs.gate.start = pairs.expert->blob + reinterpret_cast<uintptr_t>(pairs.gate.start);
        pairs.up.start = pairs.expert->blob + reinterpret_cast<uintptr_t>(pairs.up.start);
        const Fetched fetched = start(pairs, ring.first_copy(), ring.first_stage(), lane);
        advance(share(), pairs.num_rows, lane);
        ring.count_first(fetched, lane);
    }

    // The same items.
    template <class Other>
    __device__ __forceinline__ explicit GateUpItems(const GateUpItems<Other>& items)
        : p_(items.p_), plan_(items.plan_), list_(items.list_), shared_(items.shared_), warp_(items.warp_) {}

    __device__ __forceinline__ Fetched fetch(int, device::StagedCopy& copy, uint8_t* stage, int lane) const {
        const RowPairs pairs = next(lane);
        if (pairs.num_rows > 0 && is_streamed(*pairs.expert)) await_posts(list_, p_.state, p_.layer, lane);
        return start(pairs, copy, stage, lane);
    }

    __device__ __forceinline__ void compute(const uint8_t* stage, int lane) const {
        const Note pairs = note_of<Note>(stage);
        multiply(pairs, stage, lane);
        __syncwarp();
        const int num_rows = pairs.num_rows, num_inputs = quant::kOneRow<T> ? 1 : pairs.expert->count;
        for (int i = lane; i < num_inputs * num_rows; i += 32) {
            const int input = quant::kOneRow<T> ? 0 : small_quotient(i, num_rows), row = i - input * num_rows;
            const float* values = results() + input * 2 * num_rows + row;
            const int64_t pair = list_.pairs[pairs.expert->first + input];
            p_.h[pair * p_.gate.rows + pairs.row + row] = quant::swiglu_value(values[0], values[num_rows]);
        }
    }

    // Every item; after ring.fetch().
    __device__ __forceinline__ void run(StageRing& ring, int lane) const {
        if constexpr (std::is_same_v<T, quant::EachType>) {
            if (p_.gate.type == p_.up.type) {
                quant::with_type(p_.gate.type, [&]<class Own>() TANDEM_INLINE_BODY { ring.run(GateUpItems<Own>(*this), lane); });
                return;
            }
        }
        ring.run(*this, lane);
    }

  private:
    template <class>
    friend class GateUpItems;

    struct Note {
        const RoutedExpert* expert;
        int row;
        int num_rows;
        uint32_t gate;  // where its rows begin in the stage
        uint32_t up;
    };

    __device__ __forceinline__ ShareOfExperts& share() const {
        return reinterpret_cast<ShareOfExperts*>(shared_ + plan_.shares)[warp_];
    }
    __device__ __forceinline__ FirstStage& first() const { return reinterpret_cast<FirstStage*>(shared_ + plan_.firsts)[warp_]; }
    __device__ __forceinline__ float* results() const {
        return reinterpret_cast<float*>(shared_ + plan_.results) + warp_ * kGateUpResults;
    }

    __device__ __forceinline__ Fetched start(const RowPairs& pairs, device::StagedCopy& copy, uint8_t* stage, int lane) const {
        if (pairs.num_rows == 0) return Fetched::none;
        if (lane == 0)
            note_of<Note>(stage) = {pairs.expert, pairs.row, pairs.num_rows, pairs.gate.offset,
                                    pairs.gate.nbytes + pairs.up.offset};
        copy.start(stage, pairs.gate.start, pairs.gate.nbytes, lane);
        copy.start(stage + pairs.gate.nbytes, pairs.up.start, pairs.up.nbytes, lane);
        return pairs.is_last ? Fetched::last : Fetched::more;
    }

    // The next rows of the warp's share; beyond its last there are none.
    __device__ __forceinline__ RowPairs next(int lane) const {
        const ShareOfExperts left = share();
        if (left.num_rows == 0) return {};
        const int here = min(p_.gate.rows - left.row, left.num_rows), num_rows = min(here, plan_.ring_plan.stage_rows);
        const RoutedExpert& expert = list_.experts[list_.of_side[kCardSide][left.expert]];
        advance(left, num_rows, lane);
        return {&expert,
                left.row,
                num_rows,
                span_of(expert, p_.gate, left.row, num_rows),
                span_of(expert, p_.up, left.row, num_rows),
                num_rows == left.num_rows};
    }

    // After a fetch of so many rows of `left`, the share as it was.
    __device__ __forceinline__ void advance(const ShareOfExperts& left, int num_rows, int lane) const {
        const bool ends = left.row + num_rows == p_.gate.rows;  // the expert
        const ShareOfExperts now = {left.expert + ends, ends ? 0 : left.row + num_rows, left.num_rows - num_rows};
        __syncwarp();  // all lanes have read it
        if (lane == 0) share() = now;
        __syncwarp();
    }

    // results()[input][gate rows, then up rows]
    __device__ __forceinline__ void multiply(const Note& pairs, const uint8_t* stage, int lane) const {
        const uint8_t *gate = stage + pairs.gate, *up = stage + pairs.up;
        const bool in_one = p_.gate.type == p_.up.type && up == gate + pairs.num_rows * p_.gate.row_bytes;
        quant::RowDots dots{};
        dots.num_rows = in_one ? 2 * pairs.num_rows : pairs.num_rows;
        dots.columns = p_.gate.columns;
        dots.num_inputs = pairs.expert->count;
        dots.input_rows = pairs.expert->input_rows;
        dots.out_stride = 2 * pairs.num_rows;
#pragma unroll 1
        for (int i = 0; i < (in_one ? 1 : 2); i++) {
            const bool wants_values = i == 0 ? plan_.gate_wants_values : plan_.up_wants_values;
            dots.weights = i == 0 ? gate : up;
            dots.row_bytes = static_cast<uint32_t>(i == 0 ? p_.gate.row_bytes : p_.up.row_bytes);
            dots.groups = wants_values ? nullptr : reinterpret_cast<const quant::SharedGroup*>(shared_ + plan_.groups);
            dots.values = wants_values ? reinterpret_cast<const float*>(shared_ + plan_.values) : nullptr;
            dots.table = shared_ + (i == 0 ? plan_.gate_table : plan_.up_table);
            dots.out = results() + i * pairs.num_rows;
            quant::dot_window_rows<T>(i == 0 ? p_.gate.type : p_.up.type, dots, lane);
        }
    }

    const GateUpProblem& p_;
    const GateUpPlan& plan_;
    const RoutedList& list_;
    unsigned char* shared_;
    int warp_;
};

}  // namespace tandem::cuda
