#include "cuda_ops/gate_up_window.h"

#include <algorithm>
#include <string>

#include "base/require.h"
#include "cuda_ops/norm_rows.cuh"
#include "cuda_ops/route.cuh"
#include "cuda_ops/stage_ring.cuh"
#include "device/launch.h"
#include "quant/row_device.cuh"

namespace tandem::cuda {

namespace {

constexpr int kStageRows = 3;     // of gate, and as many of up, where a warp has several stages
constexpr int kMaxStageRows = 8;  // where one stage holds all that a warp has
constexpr int kResults = std::max(kMaxWindowRows * 2 * kStageRows, 2 * kMaxStageRows);  // of a stage
constexpr size_t kNormBytes = 64 * 1024;  // rows of more than this together are normed one after the other
constexpr int kSharedPercent = 60;        // of a multiprocessor's, so that the next kernel's blocks find room while these still run

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
        const EvenShare share = share_of_experts(list.num_on_card, p.gate.rows, blockIdx.x * plan.ring_plan.num_warps + warp,
                                                 plan.num_blocks * plan.ring_plan.num_warps);
        fetched_ = computed_ = share.begin;
        end_ = share.end;
        results_ = reinterpret_cast<float*>(shared + plan.results) + warp * kResults;
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
        const RoutedExpert& expert = list_.experts[list_.on_card[index]];
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

__device__ __forceinline__ void norm(const GateUpProblem& p, const GateUpPlan& plan, unsigned char* shared) {
    const int width = p.gate.columns, groups = (width + quant::kSuper - 1) / quant::kSuper;
    NormRows rows{};
    rows.gamma = p.gamma;
    rows.width = width;
    rows.eps = p.eps;
    rows.inverse = reinterpret_cast<float*>(shared + plan.inverse);
    for (int first = 0; first < p.num_rows; first += plan.norm_rows) {
        rows.x = p.hidden + first * width;
        rows.num_rows = min(plan.norm_rows, p.num_rows - first);
        if (plan.wants_groups()) rows.groups = reinterpret_cast<quant::ActGroup*>(shared + plan.groups) + first * groups;
        if (plan.wants_values()) rows.values = reinterpret_cast<float*>(shared + plan.values) + first * width;
        rows.scratch = plan.wants_values() ? rows.values : reinterpret_cast<float*>(shared + plan.rings);
        norm_rows(rows, fetch_gamma(p.gamma, width, threadIdx.x, kWindowThreads), threadIdx.x, kWindowThreads);
    }
}

// Tells the host what it has to compute; one block calls it.
__device__ void post_misses(const GateUpProblem& p, const GateUpPlan& plan, const RoutedList& list, const unsigned char* shared) {
    const int thread = threadIdx.x, num_pairs = p.num_rows * p.choice.top_k, columns = p.gate.columns;
    if (thread < list.num_on_host) {
        const RoutedExpert& expert = list.experts[list.on_host[thread]];
        p.post.experts[thread] = {expert.expert, expert.tier_first, expert.count};
    }
    if (thread < num_pairs && !list.experts[list.expert_of[thread]].blob) p.post.pairs[list.tier_place[thread]] = thread;
    if (plan.wants_groups()) {
        const int units =
            p.num_rows * ((columns + quant::kSuper - 1) / quant::kSuper) * static_cast<int>(sizeof(quant::ActGroup) / 16);
        for (int i = thread; i < units; i += kWindowThreads)
            reinterpret_cast<uint4*>(p.post.groups)[i] = reinterpret_cast<const uint4*>(shared + plan.groups)[i];
    }
    if (plan.wants_values())
        for (int i = thread; i < p.num_rows * columns; i += kWindowThreads)
            p.post.values[i] = reinterpret_cast<const float*>(shared + plan.values)[i];
    if (thread == 0) {
        p.post.header->layer = p.layer;
        p.post.header->num_rows = p.num_rows;
        p.post.header->num_experts = list.num_on_host;
        p.post.header->num_pairs = list.num_host_pairs;
    }
    __threadfence_system();
    __syncthreads();
    if (thread == 0) {
        const uint32_t sequence = __ldcg(&p.state->posted) + 1;
        p.state->posted = sequence;
        device::store_release_system(&p.post.header->sequence, sequence);
    }
}

// Uses of the experts, and rows by tier; one block calls it.
__device__ void count_uses(const GateUpProblem& p, const RoutedList& list) {
    const int thread = threadIdx.x;
    if (thread >= list.num_experts) return;
    const RoutedExpert& expert = list.experts[thread];
    if (p.uses) atomicAdd(p.uses + expert.expert, static_cast<uint32_t>(expert.count));
    if (p.tier_rows) atomicAdd(p.tier_rows + expert.tier, static_cast<unsigned long long>(expert.count));
}

__global__ void __launch_bounds__(kWindowThreads, 2)
    gate_up_kernel(const __grid_constant__ GateUpProblem p, const __grid_constant__ GateUpPlan plan) {
    unsigned char* shared = device::dynamic_shared();
    RoutedList& list = *reinterpret_cast<RoutedList*>(shared);
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    if (p.hidden_is_fresh) device::wait_prerequisites();
    load_slots(list, p.places, p.choice.num_experts, thread, kWindowThreads);
    quant::load_table(p.gate.type, shared + plan.gate_table, thread, kWindowThreads);
    if (p.up.type != p.gate.type) quant::load_table(p.up.type, shared + plan.up_table, thread, kWindowThreads);
    norm(p, plan, shared);
    if (thread == 0) StageRing::init(shared + plan.rings, plan.ring_plan);
    device::fence_stores();
    __syncthreads();
    if (!p.hidden_is_fresh) device::wait_prerequisites();
    device::launch_dependents();
    route_rows(list, p.choice, p.places, p.num_rows, thread, kWindowThreads);

    GateUpItems items(p, plan, list, shared, warp);
    StageRing ring(shared + plan.rings, plan.ring_plan, warp);
    const bool fetches = warp < plan.ring_plan.num_warps;
    if (fetches) ring.fetch(items, lane);
    if (blockIdx.x == 0) {
        if (list.num_on_host > 0) post_misses(p, plan, list, shared);
        count_uses(p, list);
    }
    if (fetches) ring.run(items, lane);
}

// One stage for each warp; no warps where it does not fit.
RingPlan plan_single_stage(size_t available, int rows, size_t rows_bytes) {
    if (rows > kMaxStageRows) return {};
    const size_t stage = stage_bytes(rows, rows_bytes, 2), all = kWindowWarps * (stage + sizeof(device::StagedCopy));
    if (all > available) return {};
    return {kWindowWarps, 1, rows, static_cast<uint32_t>(stage), static_cast<uint32_t>(all)};
}

}  // namespace

GateUpPlan plan_gate_up(const GateUpProblem& p, const CardShape& card) {
    check_routing(p.num_rows, p.choice, p.places);
    check_part(p.gate, p.places);
    check_part(p.up, p.places);
    require(p.gate.rows == p.up.rows && p.gate.columns == p.up.columns, "gate and up do not fit together");
    const int64_t columns = p.gate.columns;
    GateUpPlan plan{};
    plan.gate_wants_values = quant::type_wants_values(p.gate.type);
    plan.up_wants_values = quant::type_wants_values(p.up.type);
    plan.num_blocks = card.num_window_blocks();
    SharedPieces pieces;
    pieces.take(sizeof(RoutedList));
    plan.groups = pieces.take(plan.wants_groups() ? p.num_rows * ((columns + 255) / 256) * sizeof(quant::ActGroup) : 0);
    plan.values = pieces.take(plan.wants_values() ? p.num_rows * columns * sizeof(float) : 0);
    plan.inverse = pieces.take(kMaxWindowRows * sizeof(float));
    plan.gate_table = pieces.take(quant::table_bytes(p.gate.type));
    plan.up_table = p.up.type == p.gate.type ? plan.gate_table : pieces.take(quant::table_bytes(p.up.type));
    plan.results = pieces.take(kWindowWarps * kResults * sizeof(float));
    plan.rings = pieces.take(0);
    const size_t rows_bytes = p.gate.row_bytes + p.up.row_bytes;
    // Of a warp, if each of a single row's experts is on the card.
    const int warps_per_expert = std::max(1, plan.num_blocks * kWindowWarps / p.choice.top_k);
    const int share_rows = p.num_rows == 1 ? (p.gate.rows + warps_per_expert - 1) / warps_per_expert : kMaxStageRows + 1;
    const size_t value_bytes = columns * sizeof(float);
    plan.norm_rows = static_cast<int32_t>(std::clamp<size_t>(kNormBytes / value_bytes, 1, p.num_rows));
    const size_t scratch_bytes = plan.wants_values() ? 0 : plan.norm_rows * value_bytes;
    for (const size_t limit : {card.modest_shared_bytes(kSharedPercent), card.block_shared_bytes}) {
        if (limit < plan.rings + scratch_bytes) continue;
        plan.ring_plan = plan_single_stage(limit - plan.rings, share_rows, rows_bytes);
        if (plan.ring_plan.num_warps > 0) break;
        plan.ring_plan = plan_rings(limit - plan.rings, kStageRows, rows_bytes, 2);
        if (plan.ring_plan.num_stages >= 2) break;
    }
    require(plan.ring_plan.num_warps > 0, "gate and up rows of " + std::to_string(rows_bytes) + " bytes for " +
                                              std::to_string(p.num_rows) + " rows do not fit the " +
                                              std::to_string(card.block_shared_bytes) + " bytes of shared memory");
    plan.shared_bytes = plan.rings + static_cast<uint32_t>(std::max<size_t>(plan.ring_plan.nbytes, scratch_bytes));
    return plan;
}

void gate_up_window(const GateUpProblem& p, const CardShape& card, bool dependent, cudaStream_t stream) {
    const GateUpPlan plan = plan_gate_up(p, card);
    const auto blocks = static_cast<unsigned>(plan.num_blocks);
    device::launch({dim3(blocks), dim3(kWindowThreads), plan.shared_bytes, stream, dependent}, gate_up_kernel, p, plan);
}

}  // namespace tandem::cuda
