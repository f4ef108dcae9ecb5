#include "cuda_ops/serve_window.h"

#include <algorithm>

#include "cuda_ops/down_items.cuh"
#include "cuda_ops/gate_up_items.cuh"
#include "device/launch.h"

namespace tandem::cuda {

namespace {

// Beside the kernel that waits for its own rows, with what the system takes of a multiprocessor per block.
constexpr size_t kServedPercent = 48;
constexpr size_t kStaticBytes = 1024;  // of shared memory, beside what is planned
constexpr int kFetchThreads = 512;

// A word that another processor has written.
__device__ __forceinline__ uint32_t fresh(const uint32_t& word) {
    return *static_cast<const volatile uint32_t*>(&word);
}

__device__ __forceinline__ link::Request request_of(const MissPost& post) {
    const link::Request& request = *post.request;
    return {fresh(request.layer), fresh(request.num_rows), fresh(request.num_experts), fresh(request.num_pairs)};
}

// What a thread reads of a request before it knows how much of that there is: everything at once, since each trip to memory takes
// as long as the work itself. Beyond the request's end it means nothing.
struct RequestPart {
    link::RequestExpert expert;  // number `thread`
    uint32_t first;              // the first pair behind the expert before
    uint32_t row;                // of pair `thread`
};

__device__ __forceinline__ link::RequestExpert expert_of(const MissPost& post, int index) {
    const link::RequestExpert& expert = post.experts[index];
    return {fresh(expert.expert), fresh(expert.first), fresh(expert.count)};
}

__device__ __forceinline__ RequestPart part_of(const ServeProblem& p, int thread) {
    RequestPart part{};
    if (thread < p.max_pairs) part.row = fresh(reinterpret_cast<const uint32_t*>(p.post.pair_rows)[thread]);
    if (thread >= p.max_experts) return part;
    part.expert = expert_of(p.post, thread);
    if (thread > 0) {
        const link::RequestExpert before = expert_of(p.post, thread - 1);
        part.first = before.first + before.count;
    }
    return part;
}

// A request as its blocks see it, in shared memory. What the other side wrote is checked, so that a broken one cannot make this one
// read or write astray.
template <class Work>
struct ServedRequest {
    link::Request request;
    Work work;  // of its layer
    bool is_sound;
    int32_t num_late;  // of its experts, which are in no slot

    __device__ __forceinline__ bool wants_work() const { return is_sound && request.num_experts > 0; }

    // All threads of the block call, with their part; has barriers inside and one at its end. `list` becomes one of experts with a
    // pair each, all of them the card's; it has none where the request is not sound.
    __device__ __forceinline__ void read(RoutedList& list, const ServeProblem& p, Work ServedLayer::* work_of) {
        const int thread = threadIdx.x;
        const RequestPart part = part_of(p, thread);
        const link::Request asked = request_of(p.post);
        const bool has_layer =
            asked.layer < static_cast<uint32_t>(p.num_layers) && asked.num_rows <= static_cast<uint32_t>(p.max_rows);
        if (has_layer) {
            const ServedLayer& layer = p.layers[asked.layer + (asked.num_rows > 1 ? p.num_layers : 0)];
            static_assert(sizeof(Work) % 8 == 0 && sizeof(Work) / 8 <= kWindowThreads);
            if (thread < static_cast<int>(sizeof(Work) / 8))
                reinterpret_cast<uint64_t*>(&work)[thread] =
                    __ldcg(reinterpret_cast<const unsigned long long*>(&(layer.*work_of)) + thread);
        }
        if (thread < p.max_pairs) list.ids[thread] = static_cast<int32_t>(part.row);
        if (thread < kNumSides) list.num_of_side[thread] = list.pairs_of_side[thread] = 0;
        __syncthreads();
        if (thread == 0) {
            const Choice& choice = work.problem.choice;
            request = asked;
            is_sound = has_layer && asked.num_experts <= asked.num_pairs &&
                       asked.num_experts <= static_cast<uint32_t>(min(p.max_experts, choice.num_experts)) &&
                       asked.num_pairs <= asked.num_rows * static_cast<uint32_t>(choice.top_k);
            num_late = 0;
        }
        __syncthreads();
        const bool lists = is_sound && thread < static_cast<int>(asked.num_experts);
        __syncthreads();
        if (lists && !add_expert(list, part)) is_sound = false;
        __syncthreads();
        if (thread == 0 && is_sound)
            list.num_experts = list.num_of_side[kCardSide] = list.pairs_of_side[kCardSide] = static_cast<int32_t>(asked.num_pairs);
        __syncthreads();
    }

  private:
    // One expert of the request, as many experts of the list. False if it cannot be computed.
    __device__ __forceinline__ bool add_expert(RoutedList& list, const RequestPart& part) {
        const link::RequestExpert& asked = part.expert;
        const ExpertPlaces& places = work.problem.places;
        if (asked.expert >= static_cast<uint32_t>(work.problem.choice.num_experts) || asked.first != part.first ||
            asked.count < 1 || asked.count > request.num_rows || asked.first > request.num_pairs ||
            asked.count > request.num_pairs - asked.first)
            return false;
        const int slot = __ldcg(places.slots + asked.expert);
        RoutedExpert expert{};
        expert.expert = static_cast<int32_t>(asked.expert);
        expert.count = 1;
        expert.side = kCardSide;
        expert.tier = static_cast<int16_t>(slot >= 0 ? Tier::own : Tier::streamed);
        expert.blob = slot >= 0      ? places.slot_base + static_cast<int64_t>(slot) * static_cast<int64_t>(places.blob_bytes)
                      : places.arena ? places.arena + asked.expert * places.blob_bytes
                                     : nullptr;
        if (slot < 0) atomicAdd(&num_late, 1);
        for (uint32_t pair = asked.first; pair < asked.first + asked.count; pair++) {
            const auto row = static_cast<uint32_t>(list.ids[pair]);
            if (row >= request.num_rows) return false;
            expert.first = expert.side_first = static_cast<int32_t>(pair);
            expert.input_rows = row;
            list.experts[pair] = expert;
            list.pairs[pair] = list.side_place[pair] = list.expert_of[pair] = static_cast<int32_t>(pair);
            list.of_side[kCardSide][pair] = static_cast<uint8_t>(pair);
        }
        return expert.blob != nullptr;
    }
};

// In static shared memory of the kernel.
template <class Work>
__device__ __forceinline__ ServedRequest<Work>& served_request() {
    alignas(16) __shared__ unsigned char memory[sizeof(ServedRequest<Work>)];  // no constructor runs there
    return *reinterpret_cast<ServedRequest<Work>*>(memory);
}

__device__ __forceinline__ void load_inputs(const MissPost& post, const ServedGateUp& work, int num_rows, unsigned char* shared) {
    const int columns = work.problem.gate.columns, groups = (columns + quant::kSuper - 1) / quant::kSuper, thread = threadIdx.x;
    if (work.plan.wants_groups())
        quant::load_groups(post.groups, reinterpret_cast<quant::SharedGroup*>(shared + work.plan.groups), num_rows * groups, thread,
                           kWindowThreads);
    if (work.plan.wants_values())
        for (int i = thread; i < num_rows * columns; i += kWindowThreads)
            reinterpret_cast<float*>(shared + work.plan.values)[i] = __ldcg(post.values + i);
}

__global__ void __launch_bounds__(kWindowThreads, 2) serve_gate_up_kernel(const __grid_constant__ ServeProblem p) {
    ServedRequest<ServedGateUp>& served = served_request<ServedGateUp>();
    unsigned char* shared = device::dynamic_shared();
    RoutedList& list = *reinterpret_cast<RoutedList*>(shared);
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    device::wait_prerequisites();
    served.read(list, p, &ServedLayer::gate_up);
    device::launch_dependents();
    if (!served.wants_work()) return;
    const GateUpProblem& work = served.work.problem;
    const GateUpPlan& plan = served.work.plan;
    StageRing ring(shared + plan.rings, plan.ring_plan, warp, lane);
    const GateUpItems<quant::EachType> items(work, plan, list, shared, warp);
    items.take_share(list.num_of_side[kCardSide], lane);
    const bool fetches = warp < plan.ring_plan.num_warps;
    if (fetches) ring.fetch(items, lane);
    quant::load_table(work.gate.type, shared + plan.gate_table, thread, kWindowThreads);
    if (work.up.type != work.gate.type) quant::load_table(work.up.type, shared + plan.up_table, thread, kWindowThreads);
    load_inputs(p.post, served.work, static_cast<int>(served.request.num_rows), shared);
    __syncthreads();
    if (fetches) items.run(ring, lane);
}

// The last block tells the asker, and the host.
__device__ __forceinline__ void answer(const ServeProblem& p, const ServedRequest<ServedDown>& served, uint32_t number) {
    const uint32_t num_late = served.is_sound ? static_cast<uint32_t>(served.num_late) : 0;
    p.state->num_blocks = 0;
    const bool is_empty = served.request.num_experts == 0;  // nobody asked: the server stops
    const link::Status status = !served.is_sound ? link::Status::refused
                                : is_empty       ? link::Status::dropped
                                                 : link::Status::computed;
    *p.post.status = static_cast<uint32_t>(status);
    *p.post.late = num_late;
    __threadfence_system();
    device::store_release_system(p.post.done, number);
    p.counts->rows = p.state->rows += served.is_sound ? served.request.num_pairs : 0;
    p.counts->late_experts = p.state->late_experts += num_late;
    device::store_release_system(&p.counts->answered, number);
}

__global__ void __launch_bounds__(kWindowThreads, 2) serve_down_kernel(const __grid_constant__ ServeProblem p, uint32_t number) {
    ServedRequest<ServedDown>& served = served_request<ServedDown>();
    __shared__ bool is_last;
    RoutedList& list = *reinterpret_cast<RoutedList*>(device::dynamic_shared());
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    served.read(list, p, &ServedLayer::down);
    if (served.wants_work()) {
        const DownProblem& work = served.work.problem;
        const DownPlan& plan = served.work.plan;
        const DownBlock block(work, plan);
        quant::load_table(work.down.type, block.shared + plan.table, thread, kWindowThreads);
        StageRing ring(block.shared + plan.rings, plan.ring_plan, warp, lane);
        const bool fetches = warp < plan.ring_plan.num_warps;
        DownPass pass = pass_from<quant::EachType>(list, 0, plan.held_pairs);
        const DownItems<quant::EachType> items(work, plan, block, pass, warp);
        if (fetches) ring.fetch(items, lane);
        device::wait_prerequisites();
        const int num_pairs = static_cast<int>(served.request.num_pairs);
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
    if (is_last && thread == 0) answer(p, served, number);
}

__device__ __forceinline__ void fetch_units(const RequestFetch& p, int begin, int end) {
#pragma unroll 2
    for (int i = begin + static_cast<int>(threadIdx.x); i < end; i += kFetchThreads) p.to[i] = __ldcv(p.from + i);
}

__global__ void __launch_bounds__(kFetchThreads) fetch_kernel(const __grid_constant__ RequestFetch p) {
    device::wait_prerequisites();
    device::launch_dependents();
    fetch_units(p, 0, p.one_row_units);
    __syncthreads();
    if (reinterpret_cast<const link::Request*>(p.to)->num_rows > 1) fetch_units(p, p.one_row_units, p.num_units);
}

}  // namespace

void fetch_request(const RequestFetch& fetch, cudaStream_t stream) {
    device::launch({dim3(1), dim3(kFetchThreads), 0, stream, false, true}, fetch_kernel, fetch);
}

ServedLayer plan_served(const ServedShape& shape, int num_rows, const CardShape& card, bool shares_card) {
    CardShape part = card;
    if (shares_card) part.block_shared_bytes = std::min(card.block_shared_bytes, card.card_shared_bytes * kServedPercent / 100);
    static_assert(sizeof(ServedRequest<ServedGateUp>) + 16 <= kStaticBytes &&
                  sizeof(ServedRequest<ServedDown>) + 16 <= kStaticBytes);
    part.block_shared_bytes -= std::min(part.block_shared_bytes, kStaticBytes);
    ServedLayer layer{};
    GateUpProblem& gate_up = layer.gate_up.problem;
    DownProblem& down = layer.down.problem;
    gate_up.num_rows = down.num_rows = num_rows;
    gate_up.choice.num_experts = shape.num_experts;
    gate_up.choice.top_k = shape.top_k;
    gate_up.places = down.places = shape.places;
    gate_up.gate = shape.gate;
    gate_up.up = shape.up;
    gate_up.h = shape.h;
    layer.gate_up.plan = plan_gate_up(gate_up, part);
    down.choice = gate_up.choice;
    down.down = shape.down;
    down.h = shape.h;
    layer.down.plan = plan_down(down, part);
    DownProblem waiting = down;
    waiting.leaves_room = true;
    if (shares_card) plan_down(waiting, card);
    return layer;
}

void size_launches(ServeProblem& problem, const std::vector<ServedLayer>& layers) {
    for (const ServedLayer& layer : layers) {
        problem.gate_up_blocks = std::max(problem.gate_up_blocks, layer.gate_up.plan.num_blocks);
        problem.gate_up_shared_bytes = std::max(problem.gate_up_shared_bytes, layer.gate_up.plan.shared_bytes);
        problem.down_blocks = std::max(problem.down_blocks, layer.down.plan.num_blocks);
        problem.down_shared_bytes = std::max(problem.down_shared_bytes, layer.down.plan.shared_bytes);
    }
}

void serve_window(const ServeProblem& problem, uint32_t number, bool fetched, cudaStream_t stream) {
    const dim3 threads(kWindowThreads);
    const auto gate_up_blocks = static_cast<unsigned>(problem.gate_up_blocks),
               down_blocks = static_cast<unsigned>(problem.down_blocks);
    device::launch({dim3(gate_up_blocks), threads, problem.gate_up_shared_bytes, stream, fetched, true}, serve_gate_up_kernel,
                   problem);
    device::launch({dim3(down_blocks), threads, problem.down_shared_bytes, stream, true}, serve_down_kernel, problem, number);
}

}  // namespace tandem::cuda
