#include "cuda_ops/attention_window.h"

#include <algorithm>
#include <bit>

#include "base/require.h"
#include "cuda_ops/attention_window_merge.cuh"
#include "device/launch.h"

namespace tandem::cuda {

namespace {

constexpr int kMaxQueries = 16;

// Where a block is on its way through its spans.
struct ChunkPlace {
    int64_t span;
    int64_t tile;  // first of the chunk
};

template <class Value>
__device__ __forceinline__ ChunkPlace next_chunk(const WindowBlock<Value>& block, const ChunkPlace& place) {
    const int64_t tile = place.tile + block.chunk_tiles;
    if (tile < (place.span + 1) * kSpanTiles && tile * kKvTile < block.end()) return {place.span, tile};
    const int64_t span = place.span + gridDim.y;
    return {span, span * kSpanTiles};
}

// Queries into shared memory, the window's keys and values too where one of the block's spans holds them, states cleared.
template <class Value>
__device__ __forceinline__ void prepare_rows(const WindowBlock<Value>& block, const AttentionWindowProblem& p) {
    const int dim = block.head_dim;
    for (int q = block.warp; q < block.num_queries; q += block.num_warps) {
        const int row = block.row_of(q);
        turn_head(p.query + (int64_t{row} * p.query_heads + block.head_of(q)) * dim, p.query_gamma, p.eps,
                  p.angles + (block.position + row) * (dim / 2), dim, block.lane, block.query + q * dim);
    }
    bool has_new = false;
    for (int64_t span = block.position / kSpan; span < block.num_spans(); span++)
        has_new = has_new || span % gridDim.y == blockIdx.y;
    if (has_new) make_new_rows(block, p);
}

template <class Value>
__device__ __forceinline__ void clear_states(const WindowBlock<Value>& block) {
    for (int q = static_cast<int>(threadIdx.x); q < block.num_queries; q += static_cast<int>(blockDim.x))
        block.states[q] = {-INFINITY, 0.0f};
}

template <class Value>
__device__ __forceinline__ void store_states(const WindowBlock<Value>& block, const WindowSpans& spans, int64_t span) {
    for (int q = static_cast<int>(threadIdx.x); q < block.num_queries; q += static_cast<int>(blockDim.x))
        if (block.sees_span(block.row_of(q), span))
            spans.states[spans.index(block.row_of(q), block.head_of(q), span)] = block.states[q];
}

// Waits for the older of the two groups under way, and adds the window's own rows where they belong into the chunk.
template <bool of_keys, class Value>
__device__ __forceinline__ void finish_copy(const WindowBlock<Value>& block, int64_t first_tile) {
    device::copy_async_wait<1>();
    __syncthreads();
    if ((first_tile + block.chunk_tiles) * kKvTile <= block.position) return;
    splice_rows<of_keys>(block, first_tile);
    __syncthreads();
}

template <class Value, int kQueries>
__device__ __forceinline__ void attend_chunk(const WindowBlock<Value>& block, const AttentionWindowProblem& p,
                                             const WindowSpans& spans, const ChunkPlace& place, const ChunkPlace& next) {
    const bool first = place.tile == place.span * kSpanTiles, last = next.span != place.span;
    if (first) clear_states(block);
    finish_copy<true>(block, place.tile);
    score_chunk<kQueries>(block, p.scale, place.tile);
    __syncthreads();
    start_chunk<true>(block, p.kv, next.tile);
    advance_chunk(block, place.tile);
    if (block.part == 0) append_rows(block, p.kv, place.tile);
    finish_copy<false>(block, place.tile);
    const int64_t per_head = spans.num_spans * block.head_dim;
    mix_chunk<kQueries>(block, place.tile, place.span,
                        {first, last, spans.out_of(0, 0, place.span), per_head * p.query_heads, per_head});
    if (last) store_states(block, spans, place.span);
    __syncthreads();
    start_chunk<false>(block, p.kv, next.tile);
}

template <class Value, int kQueries>
__global__ void attention_window_kernel(const WindowArguments arguments) {
    const AttentionWindowProblem& p = arguments.problem;
    const WindowBlock<Value> block = window_block<Value, kQueries>(arguments);
    const int64_t num_spans = block.num_spans();
    ChunkPlace place{blockIdx.y, int64_t{blockIdx.y} * kSpanTiles};
    if (place.span >= num_spans) return;
    start_chunk<true>(block, p.kv, place.tile);
    start_chunk<false>(block, p.kv, place.tile);
    device::wait_prerequisites();
    device::launch_dependents();
    prepare_rows(block, p);
    const WindowSpans spans = WindowSpans::of(p);
    while (place.span < num_spans) {
        const ChunkPlace next = next_chunk(block, place);
        attend_chunk<Value, kQueries>(block, p, spans, place, next);
        place = next;
    }
    const auto num_blocks = static_cast<uint32_t>(num_spans < gridDim.y ? num_spans : gridDim.y);
    if (!last_of_part(block, p.counters + blockIdx.x, num_blocks)) return;
    merge_spans(block, spans);
    finish_part(block, p);
}

using Kernel = void (*)(WindowArguments);

template <class Value>
Kernel kernel_of(int num_queries) {
    switch (num_queries) {
        case 1:
            return attention_window_kernel<Value, 1>;
        case 2:
            return attention_window_kernel<Value, 2>;
        case 4:
            return attention_window_kernel<Value, 4>;
        case 8:
            return attention_window_kernel<Value, 8>;
        default:
            return attention_window_kernel<Value, kMaxQueries>;
    }
}

int value_bytes(KvType type) {
    return type == KvType::f16 ? 2 : 4;
}

void check(const AttentionWindowProblem& p) {
    const int dim = p.kv.head_dim;
    require(dim % 32 == 0 && dim >= 64 && dim <= kMaxHeadDim, "heads of " + std::to_string(dim) + " values are not supported; " +
                                                                  "multiples of 32 from 64 to " + std::to_string(kMaxHeadDim) +
                                                                  " are");
    require(p.num_rows >= 1 && p.num_rows <= kMaxWindowRows, "a window has 1 to 8 rows, not " + std::to_string(p.num_rows));
    require(p.query_heads % p.kv.num_heads == 0 && p.query_heads / p.kv.num_heads <= kMaxGroupHeads,
            std::to_string(p.query_heads) + " query heads on " + std::to_string(p.kv.num_heads) +
                " key/value heads are not supported; up to " + std::to_string(kMaxGroupHeads) + " may share one");
}

void set_part(const AttentionWindowProblem& p, int part_heads, AttentionWindowPlan& plan) {
    const int group = p.query_heads / p.kv.num_heads;
    plan.num_parts = (group + part_heads - 1) / part_heads;
    plan.part_heads = (group + plan.num_parts - 1) / plan.num_parts;
    plan.num_queries = static_cast<int>(std::bit_ceil(static_cast<unsigned>(p.num_rows * plan.part_heads)));
}

void set_chunk(const AttentionWindowProblem& p, int chunk_tiles, AttentionWindowPlan& plan) {
    plan.chunk_tiles = chunk_tiles;
    plan.shared_bytes = WindowShared::of(plan.num_queries, p.num_rows, p.kv.head_dim, chunk_tiles, value_bytes(p.kv.type)).nbytes;
}

}  // namespace

// Few spans: query heads are spread over blocks until the card is full, and a whole span is fetched before the wait. Many spans:
// all heads of a row in one block, half a span at a time, so that several blocks of a multiprocessor take turns.
AttentionWindowPlan plan_attention_window(const AttentionWindowProblem& p, const AttentionWindowShape& shape) {
    check(p);
    const int64_t cells = shape.usual_spans * p.kv.num_heads, cards = shape.num_multiprocessors;
    const int group = p.query_heads / p.kv.num_heads;
    const auto wanted_parts = static_cast<int>(std::clamp<int64_t>((cards + cells - 1) / cells, 1, group));
    AttentionWindowPlan plan{};
    set_part(p, std::min((group + wanted_parts - 1) / wanted_parts, kMaxQueries / p.num_rows), plan);
    set_chunk(p, cells * plan.num_parts > 2 * cards ? kSpanTiles / 2 : kSpanTiles, plan);
    while (plan.shared_bytes > shape.shared_bytes && plan.chunk_tiles > 1) set_chunk(p, plan.chunk_tiles / 2, plan);
    while (plan.shared_bytes > shape.shared_bytes && plan.part_heads > 1) {
        set_part(p, plan.part_heads / 2, plan);
        set_chunk(p, 1, plan);
    }
    require(plan.shared_bytes <= shape.shared_bytes,
            "attention over heads of " + std::to_string(p.kv.head_dim) + " values needs " + std::to_string(plan.shared_bytes) +
                " bytes of shared memory; this card has " + std::to_string(shape.shared_bytes));
    const int64_t columns = int64_t{p.kv.num_heads} * plan.num_parts;
    const int64_t room = cards * std::max<int64_t>(1, static_cast<int64_t>(shape.shared_bytes / plan.shared_bytes));
    const int64_t rounds = std::max<int64_t>(1, (shape.usual_spans * columns + room - 1) / room);
    plan.span_blocks = static_cast<int>((shape.usual_spans + rounds - 1) / rounds);
    return plan;
}

void attention_window(const AttentionWindowProblem& p, const AttentionWindowPlan& plan, bool dependent, cudaStream_t stream) {
    const WindowArguments arguments{p, plan.part_heads, plan.num_parts, plan.chunk_tiles};
    const dim3 grid(static_cast<unsigned>(p.kv.num_heads * plan.num_parts), static_cast<unsigned>(plan.span_blocks));
    const dim3 threads(static_cast<unsigned>(kWarpLanes * kWarpsPerTile * plan.chunk_tiles));
    const Kernel kernel = p.kv.type == KvType::f16 ? kernel_of<__half>(plan.num_queries) : kernel_of<float>(plan.num_queries);
    device::launch({grid, threads, plan.shared_bytes, stream, dependent}, kernel, arguments);
}

}  // namespace tandem::cuda
