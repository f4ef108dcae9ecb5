#include "cuda_ops/gate_up_window.h"

#include <algorithm>
#include <string>

#include "base/require.h"
#include "cuda_ops/gate_up_items.cuh"
#include "cuda_ops/norm_row.cuh"
#include "cuda_ops/norm_window.h"
#include "device/launch.h"

namespace tandem::cuda {

namespace {

constexpr int kSharedPercent = 58;  // of a multiprocessor's, so that the next kernel's blocks find room while these still run

__device__ __forceinline__ NormRow norm_of(const GateUpProblem& p, const GateUpPlan& plan, unsigned char* shared) {
    NormRow row{};
    row.x = p.hidden;
    row.gamma = p.gamma;
    row.width = p.gate.columns;
    row.eps = p.eps;
    row.inverse = reinterpret_cast<float*>(shared + plan.inverse);
    if (plan.wants_groups()) row.groups = reinterpret_cast<quant::SharedGroup*>(shared + plan.groups);
    if (plan.wants_values()) row.values = reinterpret_cast<float*>(shared + plan.values);
    row.scratch = plan.wants_values() ? row.values : reinterpret_cast<float*>(shared + plan.scratch);
    return row;
}

// Several rows as norm_window has left them. A barrier must follow.
__device__ __forceinline__ void load_normed(const GateUpProblem& p, const GateUpPlan& plan, unsigned char* shared) {
    const int width = p.gate.columns, thread = threadIdx.x;
    if (plan.wants_groups())
        quant::load_groups(p.groups, reinterpret_cast<quant::SharedGroup*>(shared + plan.groups),
                           p.num_rows * ((width + quant::kSuper - 1) / quant::kSuper), thread, kWindowThreads);
    if (plan.wants_values())
        for (int i = thread; i < p.num_rows * width; i += kWindowThreads)
            reinterpret_cast<float*>(shared + plan.values)[i] = __ldcg(p.values + i);
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
__global__ void __launch_bounds__(kWindowThreads, kBlocksOf<T>)
    gate_up_kernel(const __grid_constant__ GateUpProblem p, const __grid_constant__ GateUpPlan plan) {
    unsigned char* shared = device::dynamic_shared();
    RoutedList& list = *reinterpret_cast<RoutedList*>(shared);
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    StageRing ring(shared + plan.rings, plan.ring_plan, warp, lane);
    load_slots(list, p.places, p.choice.num_experts, thread, kWindowThreads);
    if (quant::table_bytes(p.gate.type) > 0) quant::load_table(p.gate.type, shared + plan.gate_table, thread, kWindowThreads);
    if (p.up.type != p.gate.type && quant::table_bytes(p.up.type) > 0)
        quant::load_table(p.up.type, shared + plan.up_table, thread, kWindowThreads);
    const GateUpItems<T> items(p, plan, list, shared, warp);
    const bool fetches = warp < plan.ring_plan.num_warps;
    bool has_fetched = false;
    if constexpr (quant::kOneRow<T>) {
        const GammaAhead gamma = fetch_gamma(p.gamma, p.gate.columns, thread);
        items.take_share(p.choice.top_k, lane);  // that of a row whose experts are all on the card
        items.plan_first(lane);
        device::wait_prerequisites();
        device::launch_dependents();
        const NormRow norm = norm_of(p, plan, shared);
        ScoreKeys keys{};
        if (warp == kWindowThreads / 32 - 1) keys = load_keys(p.choice.sums, p.choice.num_experts, lane);
        norm_row(
            norm, gamma, thread, kWindowThreads, [&](int lane) { route_one_row(list, p.choice, p.places, keys, lane); },
            [&] {
                // Posts come before what is read over the same bus.
                has_fetched = !list.asks_others() && !plan.wants_values();
                if (has_fetched && list.all_own) {
                    if (fetches) items.fetch_first(ring, lane);
                } else if (list.num_of_side[kCardSide] != p.choice.top_k) {
                    items.take_share(list.num_of_side[kCardSide], lane);
                }
                if (has_fetched && fetches) ring.fetch(items, lane);
                if (blockIdx.x == 0 && thread == 0) tell_inverse(p.state, p.layer, 0, *norm.inverse);
            });
    } else {
        // The sums come from a kernel before the one right before this one.
        route_rows(list, p.choice, p.places, p.num_rows, thread, kWindowThreads);
        items.take_share(list.num_of_side[kCardSide], lane);
        has_fetched = !list.asks_others();
        if (has_fetched && fetches) ring.fetch(items, lane);
        device::wait_prerequisites();
        device::launch_dependents();
        load_normed(p, plan, shared);
        __syncthreads();
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
RingPlan plan_single_stage(size_t available, int rows, const StagedRows& staged) {
    if (rows > kMaxGateUpStageRows) return {};
    const size_t stage = staged.stage_bytes(rows), all = ring_bytes(kWindowWarps, 1, stage);
    if (all > available) return {};
    return {kWindowWarps, 1, rows, static_cast<uint32_t>(stage), static_cast<uint32_t>(all)};
}

}  // namespace

GateUpPlan plan_gate_up(const GateUpProblem& p, const CardShape& card) {
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
    plan.inverse = pieces.take(sizeof(float));
    plan.gate_table = pieces.take(quant::table_bytes(p.gate.type));
    plan.up_table = p.up.type == p.gate.type ? plan.gate_table : pieces.take(quant::table_bytes(p.up.type));
    plan.shares = pieces.take(kWindowWarps * sizeof(ShareOfExperts));
    plan.firsts = pieces.take(has_own_kernel(p) ? kWindowWarps * sizeof(FirstStage) : 0);
    plan.results = pieces.take(kWindowWarps * kGateUpResults * sizeof(float));
    plan.rings = pieces.take(0);
    const StagedRows staged = staged_rows(p.gate) + staged_rows(p.up);
    // Of a warp, if each of a single row's experts is on the card.
    const int warps_per_expert = std::max(1, plan.num_blocks * kWindowWarps / p.choice.top_k);
    const int share_rows = p.num_rows == 1 ? (p.gate.rows + warps_per_expert - 1) / warps_per_expert : 0;
    const size_t scratch_bytes = !has_own_kernel(p) || plan.wants_values() ? 0 : columns * sizeof(float);
    const size_t least = has_own_kernel(p) ? card.modest_shared_bytes(kSharedPercent) : card.block_shared_bytes;
    for (const size_t limit : {least, card.block_shared_bytes}) {
        if (limit < plan.rings + ring_bytes(kWindowWarps, kMaxStages, 0) + scratch_bytes) continue;
        for (int rows = share_rows; rows > share_rows / 2 && plan.ring_plan.num_warps == 0; rows--)
            plan.ring_plan = plan_single_stage(limit - plan.rings, rows, staged);
        if (plan.ring_plan.num_warps > 0) break;
        plan.ring_plan = plan_rings(limit - plan.rings, {kWindowWarps, 2, kGateUpStageRows}, staged);
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
    const GateUpPlan plan = plan_gate_up(p, card);
    if (!has_own_kernel(p))
        norm_window({p.num_rows, p.hidden, p.gamma, p.gate.columns, p.eps, plan.wants_groups() ? p.groups : nullptr,
                     plan.wants_values() ? p.values : nullptr, p.state, p.layer},
                    dependent, stream);
    device::launch({dim3(static_cast<unsigned>(plan.num_blocks)), dim3(kWindowThreads), plan.shared_bytes, stream, dependent},
                   has_own_kernel(p) ? quant::kernel_of<GateUpInstance>(p.gate.type) : gate_up_kernel<quant::AnyType>, p, plan);
}

}  // namespace tandem::cuda
