// The kernel of attention_window and its instances.
#pragma once
#include "cuda_ops/attention_window_merge.cuh"

namespace tandem::cuda {

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
// `complete`: its old and new keys and values are there, but for a barrier.
template <class Value, int kQueries, int kDim>
__device__ __forceinline__ void attend_chunk(const WindowBlock<Value, kQueries, kDim>& block, const AttentionWindowProblem& p,
                                             const WindowSpans& spans, const ChunkPlace& place, const ChunkPlace& next, bool alone,
                                             bool complete) {
    const bool first = place.tile == place.span * kSpanTiles, last = next.span != place.span;
    const bool has_new = (place.tile + block.chunk_tiles) * kKvTile > block.position;
    if (first && block.thread() < kQueries) block.states[block.thread()] = {-INFINITY, 0.0f};
    if (complete) {
        __syncthreads();
    } else if (has_new) {
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
    const int q = block.num_threads() - 1 - block.thread();  // of the last threads: the first ones have values to add
    if (q < kQueries) advance_state(block, q, place.tile);
    mix_chunk(block, place.tile, place.span, mix_place(block, spans, place, alone));
    if (last && !alone && q < kQueries) store_states(block, spans, q, place.span);
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
    bool complete = block.num_rows == 1 && has_new && block.position < (place.tile + block.chunk_tiles) * kKvTile;
    const WindowRows<Value, kQueries, kDim> rows{block, p, place.tile, complete};
    const Turn<kDim> first_turn = rows.fetch(block.warp);
    if (complete) finish_copies<0>();
    device::wait_prerequisites();
    device::launch_dependents();
    if (p.sums && blockIdx.x + blockIdx.y == 0)
        for (int i = block.thread(); i < p.num_rows * p.num_sums; i += block.num_threads()) p.sums[i] = 0;
    make_rows(rows, has_new, first_turn);
    const WindowSpans spans = WindowSpans::of(p);
    const bool alone = num_spans == 1 && block.chunk_tiles == kSpanTiles;
#pragma unroll 1
    while (place.span < num_spans) {
        const ChunkPlace next = next_chunk(block, place);
        attend_chunk(block, p, spans, place, next, alone, complete);
        place = next;
        complete = false;
    }
    if (alone) return finish_part(block, p);
    const auto num_blocks = static_cast<uint32_t>(min(num_spans, static_cast<int>(gridDim.y)));
    if (!last_of_part(block, p.counters + blockIdx.x, num_blocks)) return;
    merge_spans(block, spans);
    finish_part(block, p);
}

using WindowKernel = void (*)(WindowArguments);

// `num_queries`: a power of two up to kMaxQueries.
template <class Value, int kDim>
WindowKernel window_kernel(int num_queries) {
    switch (num_queries) {
        case 1:
            return attention_window_kernel < Value, kDim == 0 ? kFewQueries : 1, kDim > ;
        case 2:
            return attention_window_kernel < Value, kDim == 0 ? kFewQueries : 2, kDim > ;
        case kFewQueries:
            return attention_window_kernel<Value, kFewQueries, kDim>;
        case 8:
            return attention_window_kernel < Value, kDim == 0 ? kMaxQueries : 8, kDim > ;
        default:
            return attention_window_kernel<Value, kMaxQueries, kDim>;
    }
}

// Lengths of heads that models have get instances of their own.
template <class Value>
WindowKernel window_kernel(int head_dim, int num_queries) {
    if (head_dim == 64) return window_kernel<Value, 64>(num_queries);
    if (head_dim == 128) return window_kernel<Value, 128>(num_queries);
    if (head_dim == 256) return window_kernel<Value, 256>(num_queries);
    return window_kernel<Value, 0>(num_queries);
}

// Instances in a file of their own.
WindowKernel int8_window_kernel(int head_dim, int num_queries);

}  // namespace tandem::cuda
