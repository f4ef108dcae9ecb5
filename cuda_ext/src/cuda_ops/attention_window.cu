#include "cuda_ops/attention_window.h"

#include <algorithm>
#include <bit>

#include "base/require.h"
#include "cuda_ops/attention_window_merge.cuh"
#include "device/launch.h"

namespace tandem::cuda {

namespace {

constexpr int kMinQueries = 2;
constexpr int kMaxQueries = 16;
constexpr int kFewQueries = 4;  // smallest instance of head lengths known only at run time

// Where a block is on its way through its spans.
struct ChunkPlace {
    int span;
    int tile;  // first of the chunk
};

template <class Block>
__device__ __forceinline__ ChunkPlace next_chunk(const Block& block, const ChunkPlace& place) {
    const int tile = place.tile + block.chunk_tiles;
    if (tile < (place.span + 1) * kSpanTiles && tile * kKvTile < block.end()) return {place.span, tile};
    const int span = place.span + static_cast<int>(gridDim.y);
    return {span, span * kSpanTiles};
}

// Whether one of the block's spans holds positions of the window.
template <class Block>
__device__ __forceinline__ bool has_new_rows(const Block& block) {
    const auto first = static_cast<unsigned>(block.position / kSpan), last = static_cast<unsigned>(block.num_spans() - 1);
    return first % gridDim.y == blockIdx.y || last % gridDim.y == blockIdx.y;
}

template <class Block>
__device__ __forceinline__ void store_states(const Block& block, const WindowSpans& spans, int q, int span) {
    if (block.exists(q) && block.sees_span(block.row_of(q), span))
        spans.states[spans.index(block.row_of(q), block.head_of(q), span)] = block.states[q];
}

// Waits until at most `num_left` groups of copies are under way, for all threads.
template <int num_left>
__device__ __forceinline__ void finish_copies() {
    device::copy_async_wait<num_left>();
    __syncthreads();
}

// The window's rows that belong into the chunk, into shared memory and by one block of the head into the cache.
template <class Value, int kQueries, int kDim>
__device__ __forceinline__ void add_rows(const WindowBlock<Value, kQueries, kDim>& block, const KvLayer& kv, int tile) {
    put_rows<Value>(block, tile, block.keys, block.values);
    if (block.part != 0) return;
    const int64_t at = tile_at(block, kv, tile);
    put_rows<Value>(block, tile, reinterpret_cast<Value*>(kv.keys) + at, reinterpret_cast<Value*>(kv.values) + at);
}

template <class Value, int kQueries, int kDim>
__device__ __forceinline__ MixPlace mix_place(const WindowBlock<Value, kQueries, kDim>& block, const WindowSpans& spans,
                                              const ChunkPlace& place, bool alone) {
    const int64_t dim = block.head_dim(), per_head = spans.num_spans * dim;
    const bool first = place.tile == place.span * kSpanTiles;
    if (alone) return {first, alone, block.out - block.first_head * dim, dim << block.heads_shift, dim};
    return {first, alone, spans.out_of(0, 0, place.span), per_head * spans.query_heads, per_head};
}

// `alone`: the chunk is all that the window sees. The sums and states of the block's queries stay in shared memory then.
template <class Value, int kQueries, int kDim>
__device__ __forceinline__ void attend_chunk(const WindowBlock<Value, kQueries, kDim>& block, const AttentionWindowProblem& p,
                                             const WindowSpans& spans, const ChunkPlace& place, const ChunkPlace& next,
                                             bool alone) {
    const bool first = place.tile == place.span * kSpanTiles, last = next.span != place.span;
    const bool has_new = (place.tile + block.chunk_tiles) * kKvTile > block.position;
    if (first && block.thread() < kQueries) block.states[block.thread()] = {-INFINITY, 0.0f};
    if (has_new) {
        finish_copies<0>();
        add_rows<Value>(block, p.kv, place.tile);
        __syncthreads();
    } else {
        finish_copies<1>();
    }
    score_chunk(block, p.scale, place.tile);
    __syncthreads();
    start_chunk<true>(block, p.kv, next.tile);
    advance_chunk(block, place.tile);
    finish_copies<1>();
    if (block.thread() < kQueries) advance_state(block, block.thread(), place.tile);
    mix_chunk(block, place.tile, place.span, mix_place(block, spans, place, alone));
    if (last && !alone && block.thread() < kQueries) store_states(block, spans, block.thread(), place.span);
    __syncthreads();
    start_chunk<false>(block, p.kv, next.tile);
}

template <class Value, int kQueries, int kDim>
__global__ void attention_window_kernel(const WindowArguments arguments) {
    const AttentionWindowProblem& p = arguments.problem;
    const auto block = window_block<Value, kQueries, kDim>(arguments);
    const int num_spans = block.num_spans();
    ChunkPlace place{static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.y) * kSpanTiles};
    if (place.span >= num_spans) return;
    const bool has_new = has_new_rows(block);
    start_chunk<true>(block, p.kv, place.tile);
    start_chunk<false>(block, p.kv, place.tile);
    const WindowRows<Value, kQueries, kDim> rows{block, p};
    const Turn<kDim> first_turn = rows.fetch(block.warp);
    device::wait_prerequisites();
    device::launch_dependents();
    make_rows(rows, has_new, first_turn);
    const WindowSpans spans = WindowSpans::of(p);
    const bool alone = num_spans == 1 && block.chunk_tiles == kSpanTiles;
#pragma unroll 1
    while (place.span < num_spans) {
        const ChunkPlace next = next_chunk(block, place);
        attend_chunk(block, p, spans, place, next, alone);
        place = next;
    }
    if (alone) return finish_part(block, p);
    const auto num_blocks = static_cast<uint32_t>(min(num_spans, static_cast<int>(gridDim.y)));
    if (!last_of_part(block, p.counters + blockIdx.x, num_blocks)) return;
    merge_spans(block, spans);
    finish_part(block, p);
}

using Kernel = void (*)(WindowArguments);

template <class Value, int kDim>
Kernel kernel_of(int num_queries) {
    switch (num_queries) {
        case kMinQueries:
            return attention_window_kernel < Value, kDim == 0 ? kFewQueries : kMinQueries, kDim > ;
        case kFewQueries:
            return attention_window_kernel<Value, kFewQueries, kDim>;
        case 8:
            return attention_window_kernel < Value, kDim == 0 ? kMaxQueries : 8, kDim > ;
        default:
            return attention_window_kernel<Value, kMaxQueries, kDim>;
    }
}

// Lengths of heads that models have get instances of their own.
Kernel kernel_of(const KvLayer& kv, int num_queries) {
    if (kv.type == KvType::f32) return kernel_of<float, 0>(num_queries);
    if (kv.head_dim == 64) return kernel_of<__half, 64>(num_queries);
    if (kv.head_dim == 128) return kernel_of<__half, 128>(num_queries);
    if (kv.head_dim == 256) return kernel_of<__half, 256>(num_queries);
    return kernel_of<__half, 0>(num_queries);
}

bool has_own_kernels(const KvLayer& kv) {
    return kv.type == KvType::f16 && std::has_single_bit(static_cast<unsigned>(kv.head_dim));
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

int power_of_two(int x) {
    return static_cast<int>(std::bit_ceil(static_cast<unsigned>(x)));
}

void set_part(const AttentionWindowProblem& p, int part_heads, AttentionWindowPlan& plan) {
    const int group = p.query_heads / p.kv.num_heads;
    plan.num_parts = (group + part_heads - 1) / part_heads;
    plan.part_heads = (group + plan.num_parts - 1) / plan.num_parts;
    plan.num_queries = std::max(power_of_two(p.num_rows) * power_of_two(plan.part_heads), kMinQueries);
    if (!has_own_kernels(p.kv)) plan.num_queries = plan.num_queries <= kFewQueries ? kFewQueries : kMaxQueries;
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
    const int rows = power_of_two(p.num_rows), fewest = std::min(group, std::max(1, kMinQueries / rows));
    set_part(p, std::clamp((group + wanted_parts - 1) / wanted_parts, fewest, kMaxQueries / rows), plan);
    set_chunk(p, cells * plan.num_parts > 2 * cards ? kSpanTiles / 2 : kSpanTiles, plan);
    while (plan.shared_bytes > shape.shared_bytes && plan.chunk_tiles > 1) set_chunk(p, plan.chunk_tiles / 2, plan);
    while (plan.shared_bytes > shape.shared_bytes && plan.part_heads > 1) {
        set_part(p, (plan.part_heads + 1) / 2, plan);
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
    const int heads_shift = std::countr_zero(static_cast<unsigned>(power_of_two(plan.part_heads)));
    const WindowArguments arguments{p, plan.part_heads, plan.num_parts, heads_shift, plan.chunk_tiles};
    const dim3 grid(static_cast<unsigned>(p.kv.num_heads * plan.num_parts), static_cast<unsigned>(plan.span_blocks));
    const dim3 threads(static_cast<unsigned>(kWarpLanes * kWarpsPerTile * plan.chunk_tiles));
    device::launch({grid, threads, plan.shared_bytes, stream, dependent}, kernel_of(p.kv, plan.num_queries), arguments);
}

}  // namespace tandem::cuda
