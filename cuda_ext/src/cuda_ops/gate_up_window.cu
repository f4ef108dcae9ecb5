#include "cuda_ops/gate_up_window.h"

#include <algorithm>
#include <string>

#include "base/require.h"
#include "cuda_ops/gate_up_items.cuh"
#include "cuda_ops/norm_rows.cuh"
#include "device/launch.h"

namespace tandem::cuda {

namespace {

constexpr size_t kNormBytes = 64 * 1024;  // rows of more than this together are normed one after the other
constexpr int kSharedPercent = 58;        // of a multiprocessor's, so that the next kernel's blocks find room while these still run

__device__ __forceinline__ NormRows norm_of(const GateUpProblem& p, const GateUpPlan& plan, unsigned char* shared) {
    NormRows rows{};
    rows.x = p.hidden;
    rows.gamma = p.gamma;
    rows.width = p.gate.columns;
    rows.eps = p.eps;
    rows.num_rows = 1;
    rows.inverse = reinterpret_cast<float*>(shared + plan.inverse);
    if (plan.wants_groups()) rows.groups = reinterpret_cast<quant::SharedGroup*>(shared + plan.groups);
    if (plan.wants_values()) rows.values = reinterpret_cast<float*>(shared + plan.values);
    rows.scratch = plan.wants_values() ? rows.values : reinterpret_cast<float*>(shared + plan.scratch);
    return rows;
}

// The norm of several rows.
__device__ __forceinline__ void norm(const GateUpProblem& p, const GateUpPlan& plan, unsigned char* shared) {
    const int width = p.gate.columns, groups = (width + quant::kSuper - 1) / quant::kSuper;
#pragma unroll 1
    for (int first = 0; first < p.num_rows; first += plan.norm_rows) {
        NormRows rows = norm_of(p, plan, shared);
        rows.x += first * width;
        rows.num_rows = min(plan.norm_rows, p.num_rows - first);
        rows.inverse += first;
        if (rows.groups) rows.groups += first * groups;
        if (rows.values) rows.scratch = rows.values += first * width;
        norm_rows(rows, threadIdx.x, kWindowThreads);
    }
}

// Lets down_window weigh its rows while this kernel still runs. One block tells; the norm's barrier must come before.
__device__ __forceinline__ void tell_inverse(const GateUpProblem& p, const GateUpPlan& plan, const unsigned char* shared) {
    if (blockIdx.x != 0 || threadIdx.x != 0) return;
    const auto* inverse = reinterpret_cast<const uint32_t*>(shared + plan.inverse);
    for (int row = 0; row < p.num_rows; row++)
        device::store_word_device(p.state->normed + row, static_cast<uint64_t>(p.layer + 1) << 32 | inverse[row]);
}

// What others are told of the window's input and of their experts, but for the number; one block calls it.
__device__ __forceinline__ void write_post(const GateUpProblem& p, const GateUpPlan& plan, const RoutedList& list, Source source,
                                           const unsigned char* shared) {
    const MissPost& post = p.posts[source];
    const int thread = threadIdx.x, num_threads = blockDim.x, num_pairs = p.num_rows * p.choice.top_k, columns = p.gate.columns;
    if (thread < list.num_of_side[source]) {
        const RoutedExpert& expert = list.experts[list.of_side[source][thread]];
        post.experts[thread] = {static_cast<uint32_t>(expert.expert), static_cast<uint32_t>(expert.side_first),
                                static_cast<uint32_t>(expert.count)};
    }
    if (thread < num_pairs && list.experts[list.expert_of[thread]].side == source)
        post.pair_rows[list.side_place[thread]] = thread / p.choice.top_k;
    if (plan.wants_groups())
        quant::store_groups(reinterpret_cast<const quant::SharedGroup*>(shared + plan.groups), post.groups,
                            p.num_rows * ((columns + quant::kSuper - 1) / quant::kSuper), thread, num_threads);
    if (plan.wants_values())
        for (int i = thread; i < p.num_rows * columns; i += num_threads)
            post.values[i] = reinterpret_cast<const float*>(shared + plan.values)[i];
    if (thread == 0)
        *post.request = {static_cast<uint32_t>(p.layer), static_cast<uint32_t>(p.num_rows),
                         static_cast<uint32_t>(list.num_of_side[source]), static_cast<uint32_t>(list.pairs_of_side[source])};
}

// Asks everybody who has to compute something, unless the window is void already, and lets streams begin; one block calls it.
__device__ void post_misses(const GateUpProblem& p, const GateUpPlan& plan, const RoutedList& list, const unsigned char* shared) {
    if (!list.asks_others()) return;
    const bool voided = __ldcg(&p.state->voided) != 0;
    for (int source = 0; source < kNumSources; source++)
        if (!voided && list.num_of_side[source] > 0) write_post(p, plan, list, static_cast<Source>(source), shared);
    __threadfence_system();
    __syncthreads();
    const int source = threadIdx.x;
    if (!voided && source < kNumSources && list.num_of_side[source] > 0) {
        const uint32_t sequence = __ldcg(&p.state->posted[source]) + 1;
        p.state->posted[source] = sequence;
        device::store_release_system(p.posts[source].sequence, sequence);
    }
    __syncthreads();
    if (threadIdx.x == 0) device::store_release_device(&p.state->asked_layers, static_cast<uint32_t>(p.layer) + 1);
}

template <class T>
__global__ void __launch_bounds__(kThreadsOf<T>, 2)
    gate_up_kernel(const __grid_constant__ GateUpProblem p, const __grid_constant__ GateUpPlan plan) {
    unsigned char* shared = device::dynamic_shared();
    RoutedList& list = *reinterpret_cast<RoutedList*>(shared);
    constexpr int num_threads = kThreadsOf<T>;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    StageRing ring(shared + plan.rings, plan.ring_plan, warp, lane);
    load_slots(list, p.places, p.choice.num_experts, thread, num_threads);
    if (quant::table_bytes(p.gate.type) > 0) quant::load_table(p.gate.type, shared + plan.gate_table, thread, num_threads);
    if (p.up.type != p.gate.type && quant::table_bytes(p.up.type) > 0)
        quant::load_table(p.up.type, shared + plan.up_table, thread, num_threads);
    const GateUpItems<T> items(p, plan, list, shared, warp);
    const bool fetches = warp < plan.ring_plan.num_warps;
    bool has_fetched = false;
    if constexpr (quant::kOneRow<T>) {
        const GammaAhead gamma = fetch_gamma(p.gamma, p.gate.columns, thread);
        items.take_share(p.choice.top_k, lane);  // that of a row whose experts are all on the card
        items.plan_first(lane);
        device::wait_prerequisites();
        device::launch_dependents();
        ScoreKeys keys{};
        if (warp == num_threads / 32 - 1) keys = load_keys(p.choice.sums, p.choice.num_experts, lane);
        norm_one_row(
            norm_of(p, plan, shared), gamma, thread, num_threads,
            [&](int lane) { route_one_row(list, p.choice, p.places, keys, lane); },
            [&] {
                // Posts come before what is read over the same bus.
                has_fetched = !list.asks_others() && !plan.wants_values();
                if (has_fetched && list.all_own) {
                    if (fetches) items.fetch_first(ring, lane);
                } else if (list.num_of_side[kCardSide] != p.choice.top_k) {
                    items.take_share(list.num_of_side[kCardSide], lane);
                }
                if (has_fetched && fetches) ring.fetch(items, lane);
                tell_inverse(p, plan, shared);
            });
    } else {
        device::wait_prerequisites();
        device::launch_dependents();
        norm(p, plan, shared);
        device::fence_stores();
        __syncthreads();
        tell_inverse(p, plan, shared);
        route_rows(list, p.choice, p.places, p.num_rows, thread, num_threads);
        items.take_share(list.num_of_side[kCardSide], lane);
    }
    if (blockIdx.x == 0) post_misses(p, plan, list, shared);
    if (fetches && !has_fetched) ring.fetch(items, lane);
    if (fetches) ring.run(items, lane);
}

template <class T>
struct GateUpInstance {
    static constexpr auto kernel = gate_up_kernel<T>;
};

bool has_own_kernel(const GateUpProblem& p) {
    return p.num_rows == 1 && p.gate.type == p.up.type;
}

// One stage for each warp, since a stage more costs as many instructions as its rows; no warps where it does not fit.
RingPlan plan_single_stage(size_t available, int num_warps, int rows, const StagedRows& staged) {
    if (rows > kMaxGateUpStageRows) return {};
    const size_t stage = staged.stage_bytes(rows), all = ring_bytes(num_warps, 1, stage);
    if (all > available) return {};
    return {num_warps, 1, rows, static_cast<uint32_t>(stage), static_cast<uint32_t>(all)};
}

}  // namespace

GateUpPlan plan_gate_up(const GateUpProblem& p, const CardShape& card, int num_threads) {
    check_routing(p.num_rows, p.choice);
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
    const int num_warps = num_threads / 32;
    plan.shares = pieces.take(num_warps * sizeof(ShareOfExperts));
    plan.firsts = pieces.take(has_own_kernel(p) ? num_warps * sizeof(FirstStage) : 0);
    plan.results = pieces.take(num_warps * kGateUpResults * sizeof(float));
    plan.rings = pieces.take(0);
    const StagedRows staged = staged_rows(p.gate) + staged_rows(p.up);
    // Of a warp, if each of a single row's experts is on the card.
    const int warps_per_expert = std::max(1, plan.num_blocks * num_warps / p.choice.top_k);
    const int share_rows = p.num_rows == 1 ? (p.gate.rows + warps_per_expert - 1) / warps_per_expert : 0;
    const size_t value_bytes = columns * sizeof(float);
    plan.norm_rows = static_cast<int32_t>(std::clamp<size_t>(kNormBytes / value_bytes, 1, p.num_rows));
    const size_t scratch_bytes = plan.wants_values() ? 0 : plan.norm_rows * value_bytes;
    for (const size_t limit : {card.modest_shared_bytes(kSharedPercent), card.block_shared_bytes}) {
        if (limit < plan.rings + ring_bytes(num_warps, kMaxStages, 0) + scratch_bytes) continue;
        for (int rows = share_rows; rows > share_rows / 2 && plan.ring_plan.num_warps == 0; rows--)
            plan.ring_plan = plan_single_stage(limit - plan.rings, num_warps, rows, staged);
        if (plan.ring_plan.num_warps > 0) break;
        plan.ring_plan = plan_rings(limit - plan.rings, {num_warps, 2, kGateUpStageRows}, staged);
        if (plan.ring_plan.num_stages >= 2) break;
    }
    require(plan.ring_plan.num_warps > 0, "gate and up rows of " + std::to_string(staged.nbytes) + " bytes for " +
                                              std::to_string(p.num_rows) + " rows do not fit the " +
                                              std::to_string(card.block_shared_bytes) + " bytes of shared memory");
    plan.scratch = plan.wants_values() ? plan.values : plan.rings + stages_at(plan.ring_plan);
    plan.shared_bytes = std::max<uint32_t>(plan.rings + plan.ring_plan.nbytes, plan.scratch + static_cast<uint32_t>(scratch_bytes));
    return plan;
}

void gate_up_window(const GateUpProblem& p, const CardShape& card, bool dependent, cudaStream_t stream) {
    const int num_threads = has_own_kernel(p) ? kOneRowThreads : kWindowThreads;
    const GateUpPlan plan = plan_gate_up(p, card, num_threads);
    const auto blocks = static_cast<unsigned>(plan.num_blocks), threads = static_cast<unsigned>(num_threads);
    device::launch({dim3(blocks), dim3(threads), plan.shared_bytes, stream, dependent},
                   has_own_kernel(p) ? quant::kernel_of<GateUpInstance>(p.gate.type) : gate_up_kernel<quant::AnyType>, p, plan);
}

}  // namespace tandem::cuda
