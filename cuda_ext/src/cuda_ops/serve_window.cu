#include "cuda_ops/serve_window.h"

#include <algorithm>

#include "cuda_ops/down_items.cuh"
#include "cuda_ops/gate_up_items.cuh"
#include "device/launch.h"

namespace tandem::cuda {

namespace {

// Beside the kernel that waits for its own rows, with what the system takes of a multiprocessor per block.
constexpr size_t kServedPercent = 48;

// A word that another processor has written.
__device__ __forceinline__ uint32_t fresh(const uint32_t& word) {
    return *static_cast<const volatile uint32_t*>(&word);
}

__device__ __forceinline__ link::Request request_of(const MissPost& post) {
    const link::Request& request = *post.request;
    return {fresh(request.layer), fresh(request.num_rows), fresh(request.num_experts), fresh(request.num_pairs)};
}

__device__ __forceinline__ const ServedLayer& layer_of(const ServeProblem& p, const link::Request& request) {
    return p.layers[request.layer + (request.num_rows > 1 ? p.num_layers : 0)];
}

__device__ __forceinline__ link::RequestExpert expert_of(const MissPost& post, int index) {
    const link::RequestExpert& expert = post.experts[index];
    return {fresh(expert.expert), fresh(expert.first), fresh(expert.count)};
}

// One expert of the request and its pairs. What the other side wrote is checked, so that a broken one cannot make this one read or
// write astray.
__device__ __forceinline__ bool list_expert(RoutedList& list, const MissPost& post, const link::Request& request,
                                            const GateUpProblem& work, int index) {
    const link::RequestExpert asked = expert_of(post, index);
    uint32_t first = 0;
    if (index > 0) {
        const link::RequestExpert before = expert_of(post, index - 1);
        first = before.first + before.count;
    }
    if (asked.expert >= static_cast<uint32_t>(work.choice.num_experts) || asked.first != first || asked.count < 1 ||
        asked.count > request.num_rows || asked.first > request.num_pairs || asked.count > request.num_pairs - asked.first)
        return false;
    const int slot = __ldcg(work.places.slots + asked.expert);
    RoutedExpert expert{};
    expert.expert = static_cast<int32_t>(asked.expert);
    expert.first = expert.side_first = static_cast<int32_t>(first);
    expert.count = static_cast<int32_t>(asked.count);
    expert.side = kCardSide;
    expert.tier = static_cast<int16_t>(slot >= 0 ? Tier::own : Tier::streamed);
    expert.blob = slot >= 0 ? work.places.slot_base + static_cast<int64_t>(slot) * static_cast<int64_t>(work.places.blob_bytes)
                  : work.places.arena ? work.places.arena + asked.expert * work.places.blob_bytes
                                      : nullptr;
    for (uint32_t i = 0; i < asked.count; i++) {
        const uint32_t pair = first + i, row = fresh(reinterpret_cast<const uint32_t*>(post.pair_rows)[pair]);
        if (row >= request.num_rows) return false;
        expert.input_rows |= row << 4 * i;
        list.pairs[pair] = list.side_place[pair] = static_cast<int32_t>(pair);
        list.expert_of[pair] = index;
    }
    list.experts[index] = expert;
    list.of_side[kCardSide][index] = static_cast<uint8_t>(index);
    return expert.blob != nullptr;
}

// The request as a routed list whose experts are all the card's. False for one that cannot be computed; a list without experts
// then. All threads of the block call; barriers inside and one at the end.
__device__ __forceinline__ bool list_request(RoutedList& list, const ServeProblem& p, const link::Request& request) {
    __shared__ bool is_sound;
    const uint32_t thread = threadIdx.x;
    if (thread == 0)
        is_sound = request.layer < static_cast<uint32_t>(p.num_layers) && request.num_rows <= static_cast<uint32_t>(p.max_rows) &&
                   request.num_experts <= request.num_pairs &&
                   request.num_experts <= static_cast<uint32_t>(layer_of(p, request).gate_up.choice.num_experts) &&
                   request.num_pairs <= request.num_rows * static_cast<uint32_t>(layer_of(p, request).gate_up.choice.top_k);
    __syncthreads();
    const bool lists = is_sound && thread < request.num_experts;
    __syncthreads();
    if (lists && !list_expert(list, p.post, request, layer_of(p, request).gate_up, static_cast<int>(thread))) is_sound = false;
    __syncthreads();
    if (thread < kNumSides) list.num_of_side[thread] = list.pairs_of_side[thread] = 0;
    __syncthreads();
    if (thread == 0 && is_sound) {
        list.num_experts = list.num_of_side[kCardSide] = static_cast<int32_t>(request.num_experts);
        list.pairs_of_side[kCardSide] = static_cast<int32_t>(request.num_pairs);
    }
    __syncthreads();
    return is_sound;
}

__device__ __forceinline__ void load_inputs(const MissPost& post, const GateUpProblem& work, const GateUpPlan& plan, int num_rows,
                                            unsigned char* shared) {
    const int columns = work.gate.columns, groups = (columns + quant::kSuper - 1) / quant::kSuper;
    if (plan.wants_groups())
        quant::load_groups(post.groups, reinterpret_cast<quant::SharedGroup*>(shared + plan.groups), num_rows * groups, threadIdx.x,
                           kWindowThreads);
    if (plan.wants_values())
        for (int i = threadIdx.x; i < num_rows * columns; i += kWindowThreads)
            reinterpret_cast<float*>(shared + plan.values)[i] = __ldcg(post.values + i);
}

__global__ void __launch_bounds__(kWindowThreads, 2) serve_gate_up_kernel(const __grid_constant__ ServeProblem p) {
    unsigned char* shared = device::dynamic_shared();
    RoutedList& list = *reinterpret_cast<RoutedList*>(shared);
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    device::wait_prerequisites();
    const link::Request request = request_of(p.post);
    const bool is_sound = list_request(list, p, request);
    device::launch_dependents();
    if (!is_sound || request.num_experts == 0) return;
    const GateUpProblem& work = layer_of(p, request).gate_up;
    const GateUpPlan& plan = layer_of(p, request).gate_up_plan;
    const GateUpItems<quant::AnyType> items(work, plan, list, shared, warp, lane);
    StageRing ring(shared + plan.rings, plan.ring_plan, warp, lane);
    const bool fetches = warp < plan.ring_plan.num_warps;
    if (fetches) ring.fetch(items, lane);
    quant::load_table(work.gate.type, shared + plan.gate_table, thread, kWindowThreads);
    if (work.up.type != work.gate.type) quant::load_table(work.up.type, shared + plan.up_table, thread, kWindowThreads);
    load_inputs(p.post, work, plan, static_cast<int>(request.num_rows), shared);
    __syncthreads();
    if (fetches) ring.run(items, lane);
}

// The last block tells the asker, and the host.
__device__ __forceinline__ void answer(const ServeProblem& p, const RoutedList& list, uint32_t number, bool is_sound) {
    uint32_t late = 0;
    for (int i = 0; i < list.num_of_side[kCardSide]; i++) late += is_streamed(list.experts[i]);
    p.state->num_blocks = 0;
    const bool is_empty = list.num_of_side[kCardSide] == 0;  // nobody asked: the server stops
    const link::Status status = !is_sound ? link::Status::refused : is_empty ? link::Status::dropped : link::Status::computed;
    *p.post.status = static_cast<uint32_t>(status);
    *p.post.late = late;
    __threadfence_system();
    device::store_release_system(p.post.done, number);
    p.counts->rows = p.state->rows += static_cast<uint64_t>(list.pairs_of_side[kCardSide]);
    p.counts->late_experts = p.state->late_experts += late;
    device::store_release_system(&p.counts->answered, number);
}

__global__ void __launch_bounds__(kWindowThreads, 2) serve_down_kernel(const __grid_constant__ ServeProblem p, uint32_t number) {
    __shared__ bool is_last;
    RoutedList& list = *reinterpret_cast<RoutedList*>(device::dynamic_shared());
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const link::Request request = request_of(p.post);
    const bool is_sound = list_request(list, p, request);
    if (is_sound && request.num_experts > 0) {
        const DownProblem& work = layer_of(p, request).down;
        const DownPlan& plan = layer_of(p, request).down_plan;
        const DownBlock block(work, plan);
        quant::load_table(work.down.type, block.shared + plan.table, thread, kWindowThreads);
        StageRing ring(block.shared + plan.rings, plan.ring_plan, warp, lane);
        const bool fetches = warp < plan.ring_plan.num_warps;
        DownPass pass = pass_from<quant::AnyType>(list, 0, plan.held_pairs);
        const DownItems<quant::AnyType> items(work, plan, block, pass, warp);
        if (fetches) ring.fetch(items, lane);
        device::wait_prerequisites();
        const int num_pairs = static_cast<int>(request.num_pairs);
        multiply_down(work, plan, block, pass, ring, items, fetches, num_pairs);
        __syncthreads();
        for (int i = thread; i < num_pairs * block.num_columns; i += kWindowThreads) {
            const int pair = i / block.num_columns, column = i % block.num_columns;
            p.post.rows[static_cast<int64_t>(pair) * work.down.rows + block.first_column + column] =
                block.rows[pair * plan.block_columns + column];
        }
    } else {
        device::wait_prerequisites();
    }
    __threadfence_system();
    __syncthreads();
    if (thread == 0) is_last = atomicAdd(&p.state->num_blocks, 1u) == gridDim.x - 1;
    __syncthreads();
    if (is_last && thread == 0) answer(p, list, number, is_sound);
}

__device__ __forceinline__ void fetch_units(const RequestFetch& p, int begin, int end) {
#pragma unroll 2
    for (int i = begin + static_cast<int>(threadIdx.x); i < end; i += kWindowThreads) p.to[i] = __ldcv(p.from + i);
}

__global__ void __launch_bounds__(kWindowThreads) fetch_kernel(const __grid_constant__ RequestFetch p) {
    fetch_units(p, 0, p.one_row_units);
    __syncthreads();
    if (reinterpret_cast<const link::Request*>(p.to)->num_rows > 1) fetch_units(p, p.one_row_units, p.num_units);
}

}  // namespace

void fetch_request(const RequestFetch& fetch, cudaStream_t stream) {
    device::launch({dim3(1), dim3(kWindowThreads), 0, stream, false}, fetch_kernel, fetch);
}

ServedLayer plan_served(const ServedShape& shape, int num_rows, const CardShape& card, bool shares_card) {
    CardShape part = card;
    if (shares_card) part.block_shared_bytes = std::min(card.block_shared_bytes, card.card_shared_bytes * kServedPercent / 100);
    ServedLayer layer{};
    layer.gate_up.num_rows = layer.down.num_rows = num_rows;
    layer.gate_up.choice.num_experts = shape.num_experts;
    layer.gate_up.choice.top_k = shape.top_k;
    layer.gate_up.places = layer.down.places = shape.places;
    layer.gate_up.gate = shape.gate;
    layer.gate_up.up = shape.up;
    layer.gate_up.h = shape.h;
    layer.gate_up_plan = plan_gate_up(layer.gate_up, part, kWindowThreads);
    layer.down.choice = layer.gate_up.choice;
    layer.down.down = shape.down;
    layer.down.h = shape.h;
    layer.down_plan = plan_down(layer.down, part, kWindowThreads);
    DownProblem waiting = layer.down;
    waiting.leaves_room = true;
    if (shares_card) plan_down(waiting, card, kWindowThreads);
    return layer;
}

void size_launches(ServeProblem& problem, const std::vector<ServedLayer>& layers) {
    for (const ServedLayer& layer : layers) {
        problem.gate_up_blocks = std::max(problem.gate_up_blocks, layer.gate_up_plan.num_blocks);
        problem.gate_up_shared_bytes = std::max(problem.gate_up_shared_bytes, layer.gate_up_plan.shared_bytes);
        problem.down_blocks = std::max(problem.down_blocks, layer.down_plan.num_blocks);
        problem.down_shared_bytes = std::max(problem.down_shared_bytes, layer.down_plan.shared_bytes);
    }
}

void serve_window(const ServeProblem& problem, uint32_t number, cudaStream_t stream) {
    const dim3 threads(kWindowThreads);
    const auto gate_up_blocks = static_cast<unsigned>(problem.gate_up_blocks),
               down_blocks = static_cast<unsigned>(problem.down_blocks);
    device::launch({dim3(gate_up_blocks), threads, problem.gate_up_shared_bytes, stream, false}, serve_gate_up_kernel, problem);
    device::launch({dim3(down_blocks), threads, problem.down_shared_bytes, stream, true}, serve_down_kernel, problem, number);
}

}  // namespace tandem::cuda
