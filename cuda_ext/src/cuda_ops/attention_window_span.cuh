// One chunk of a span: scores, softmax and the sum of values, in the order of attend_tile (ops/vector.h).
//
// Scores are chains over the head's dimensions, one per (position, query); value sums chains over positions, one per
// (dimension, query). Lanes take neighbouring positions, then neighbouring dimensions, two each.
#pragma once
#include <cmath>
#include <type_traits>

#include "cuda_ops/attention_window_block.cuh"

namespace tandem::cuda {

// Queries that one warp scores together, and whose values one thread adds together.
template <int num_queries>
constexpr int kScoreQueries = num_queries > kWarpsPerTile ? num_queries / kWarpsPerTile : 1;
template <int num_queries>
constexpr int kMixQueries = num_queries >= 8   ? 4
                            : num_queries >= 4 ? 2
                                               : 1;

// Neighbouring dimensions of a thread that adds values together; a single query is spread over more threads.
template <int num_queries>
using MixDims = std::conditional_t<num_queries == 1, float, float2>;

__device__ __forceinline__ float each_mul(float a, float b) {
    return quant::mul(a, b);
}
__device__ __forceinline__ float2 each_mul(float2 a, float b) {
    return {quant::mul(a.x, b), quant::mul(a.y, b)};
}
__device__ __forceinline__ float each_add(float a, float b) {
    return quant::add(a, b);
}
__device__ __forceinline__ float2 each_add(float2 a, float b) {
    return {quant::add(a.x, b), quant::add(a.y, b)};
}
__device__ __forceinline__ float each_fma(float a, float b, float c) {
    return quant::fma(a, b, c);
}
__device__ __forceinline__ float2 each_fma(float a, float2 b, float2 c) {
    return {quant::fma(a, b.x, c.x), quant::fma(a, b.y, c.y)};
}

__device__ __forceinline__ float warp_max(float x) {
    for (int width = kWarpLanes / 2; width > 0; width /= 2) x = fmaxf(x, __shfl_xor_sync(kWholeWarp, x, width));
    return x;
}

// scores[q][2 lane], [2 lane + 1] of one tile for kNum queries; `greatest(q, both)` is told them.
template <int kNum, class Value, class Greatest>
__device__ __forceinline__ void score_tile(const Value* keys, const float* query, int head_dim, float scale, int lane,
                                           float* scores, int stride, const Greatest& greatest) {
    using Pair = typename KvValues<Value>::Pair;
    const Pair* pairs = reinterpret_cast<const Pair*>(keys) + lane;
    float2 sums[kNum] = {};
    const auto add_dimensions = [&](int begin, int end, const auto& scales) {
#pragma unroll 4
        for (int d = begin; d < end; d += 4) {
            float2 key[4];
#pragma unroll
            for (int i = 0; i < 4; i++) key[i] = KvValues<Value>::widen(pairs[(d + i) * (kKvTile / 2)], scales);
#pragma unroll
            for (int q = 0; q < kNum; q++) {
                const float4 x = *reinterpret_cast<const float4*>(query + q * head_dim + d);
                const float four[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    sums[q].x = quant::fma(four[i], key[i].x, sums[q].x);
                    sums[q].y = quant::fma(four[i], key[i].y, sums[q].y);
                }
            }
        }
    };
    if constexpr (kHasScales<Value>) {
#pragma unroll 1
        for (int begin = 0; begin < head_dim; begin += kKvGroup)
            add_dimensions(begin, min(begin + kKvGroup, head_dim), key_scales(keys, head_dim, begin / kKvGroup, lane));
    } else {
        add_dimensions(0, head_dim, NoScales{});
    }
#pragma unroll
    for (int q = 0; q < kNum; q++) {
        const float2 scaled = {quant::mul(sums[q].x, scale), quant::mul(sums[q].y, scale)};
        reinterpret_cast<float2*>(scores + q * stride)[lane] = scaled;
        greatest(q, scaled);
    }
}

// Each warp takes one tile of the chunk for one half of the queries.
template <class Value, int kQueries, int kDim>
__device__ __forceinline__ void score_chunk(const WindowBlock<Value, kQueries, kDim>& block, float scale, int first_tile) {
    constexpr int kNum = kScoreQueries<kQueries>;
    const bool upper = block.warp >= block.chunk_tiles;
    const int tile = upper ? block.warp - block.chunk_tiles : block.warp, first = upper ? kNum : 0;
    if (block.row_of(first) >= block.num_rows || block.seen(block.num_rows - 1, first_tile + tile) == 0) return;
    const int stride = block.chunk_tiles * kKvTile, dim = block.head_dim();
    const auto greatest = [&](int q, const float2& scores) {
        const int seen = block.seen(block.row_of(first + q), first_tile + tile), j = 2 * block.lane;
        const float most = warp_max(fmaxf(j < seen ? scores.x : -INFINITY, j + 1 < seen ? scores.y : -INFINITY));
        if (block.lane == 0) block.tiles[(first + q) * kSpanTiles + tile].most = most;
    };
    score_tile<kNum>(block.keys + tile * block.tile_step(), block.query + first * dim, dim, scale, block.lane,
                     block.scores + first * stride + tile * kKvTile, stride, greatest);
}

// Eight chains over a tile, chain j in lane j, then the tree of sum8: lane 0 has the sum.
__device__ __forceinline__ float tile_sum(const float* weights, int lane) {
    using quant::add;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kKvTile; i += 8) sum = add(sum, weights[i + lane % 8]);
    sum = add(sum, __shfl_xor_sync(kWholeWarp, sum, 4));
    sum = add(sum, __shfl_xor_sync(kWholeWarp, sum, 2));
    return add(sum, __shfl_xor_sync(kWholeWarp, sum, 1));
}

// One warp turns a query's scores of a tile into exp(score - greatest so far), zero where the row sees nothing.
template <class Block>
__device__ __forceinline__ void advance_tile(const Block& block, int q, int tile, int first_tile) {
    using quant::add;
    const int seen = block.seen(block.row_of(q), first_tile + tile);
    float* scores = block.scores + (q * block.chunk_tiles + tile) * kKvTile;
    TileSoftmax* tiles = block.tiles + q * kSpanTiles;
    float max_before = block.states[q].max, max = max_before;
    for (int t = 0; t <= tile; t++) {
        max_before = max;
        if (block.seen(block.row_of(q), first_tile + t) > 0) max = fmaxf(max, tiles[t].most);
    }
#pragma unroll
    for (int j = block.lane; j < kKvTile; j += kWarpLanes) scores[j] = j < seen ? quant::exp_clamped(add(scores[j], -max)) : 0.0f;
    __syncwarp();
    const float sum = tile_sum(scores, block.lane);
    if (block.lane != 0) return;
    tiles[tile].before = seen > 0 ? quant::exp_clamped(add(max_before, -max)) : 1.0f;
    tiles[tile].sum = sum;
}

template <class Value, int kQueries, int kDim>
__device__ __forceinline__ void advance_chunk(const WindowBlock<Value, kQueries, kDim>& block, int first_tile) {
#pragma unroll 1
    for (int item = block.warp; item < kQueries * block.chunk_tiles; item += block.num_warps) {
        const int tile = item / kQueries, q = item % kQueries;
        if (block.exists(q)) advance_tile(block, q, tile, first_tile);
    }
}

// The state of a query behind the chunk; one thread calls it, a barrier after advance_chunk().
template <class Block>
__device__ __forceinline__ void advance_state(const Block& block, int q, int first_tile) {
    if (!block.exists(q)) return;
    SoftmaxState state = block.states[q];
    for (int t = 0; t < block.chunk_tiles && block.seen(block.row_of(q), first_tile + t) > 0; t++) {
        const TileSoftmax& tile = block.tiles[q * kSpanTiles + t];
        state = {fmaxf(state.max, tile.most), quant::fma(state.sum, tile.before, tile.sum)};
    }
    block.states[q] = state;
}

// sums[q] of one tile for kNum queries and the dimensions from `first_dim` on. Rows rise with q: the first query sees least.
template <int kNum, class Dims, class Value>
__device__ __forceinline__ void mix_tile(const Value* tile, int first_dim, int head_dim, const float* weights, int stride,
                                         const int (&seen)[kNum], Dims (&sums)[kNum]) {
    constexpr bool kSingle = std::is_same_v<Dims, float>;
    using Stored = std::conditional_t<kSingle, Value, typename KvValues<Value>::Pair>;
    constexpr int kStep = kSingle ? 32 : 16;
    const Value* values = tile + first_dim;
    const auto widen = [](const Stored& stored, const auto& scales) {
        if constexpr (kSingle)
            return widen_one(stored, scales);
        else
            return KvValues<Value>::widen(stored, scales);
    };
    const auto add_step = [&](int begin, const auto& sees) {
        Stored stored[kStep];
        const ValueScales<Value, kStep> scales(tile, head_dim, first_dim / kKvGroup, begin);
#pragma unroll
        for (int i = 0; i < kStep; i++) stored[i] = *reinterpret_cast<const Stored*>(values + (begin + i) * head_dim);
#pragma unroll
        for (int q = 0; q < kNum; q++) {
#pragma unroll
            for (int four = 0; four < kStep; four += 4) {
                const float4 w = *reinterpret_cast<const float4*>(weights + q * stride + begin + four);
                const float weight[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const Dims value = widen(stored[four + i], scales.of(four + i));
                    if (sees(q, begin + four + i)) sums[q] = each_fma(weight[i], value, sums[q]);
                }
            }
        }
    };
    int begin = 0;
#pragma unroll 1
    for (; begin + kStep <= seen[0]; begin += kStep) add_step(begin, [](int, int) { return true; });
#pragma unroll 1
    for (; begin < seen[kNum - 1]; begin += kStep) add_step(begin, [&](int q, int j) { return j < seen[q]; });
}

// Where sums of values lie between the chunks of a span and behind its last: in the scratch, so that shared memory is left for
// another block; those of a span that is alone and has one chunk in block.out.
struct MixPlace {
    bool first;   // chunk of the span: sums start at zero
    bool alone;   // the only span: no merge follows, which would have made +0 of -0
    float* sums;  // of (row 0, head 0)
    int64_t row;  // floats from a row to the next
    int64_t head;
};

// kNum queries from `first` on, dimensions from `first_dim` on.
template <int kNum, class Dims, class Block>
__device__ __forceinline__ void mix_item(const Block& block, int first, int first_dim, int first_tile, int span,
                                         const MixPlace& place) {
    const int dim = block.head_dim(), stride = block.chunk_tiles * kKvTile;
    Dims* stored[kNum];
    Dims sums[kNum];
#pragma unroll
    for (int q = 0; q < kNum; q++) {
        const int row = block.row_of(first + q);
        const bool wanted = block.exists(first + q) && block.sees_span(row, span);
        float* row_sums = place.sums + row * place.row + block.head_of(first + q) * place.head;
        stored[q] = wanted ? reinterpret_cast<Dims*>(row_sums + first_dim) : nullptr;
        sums[q] = stored[q] && !place.first ? *stored[q] : Dims{};
    }
#pragma unroll 1
    for (int t = 0; t < block.chunk_tiles; t++) {
        int seen[kNum];
#pragma unroll
        for (int q = 0; q < kNum; q++) {
            seen[q] = block.seen(min(block.row_of(first + q), block.num_rows - 1), first_tile + t);
            const float before = block.tiles[(first + q) * kSpanTiles + t].before;
            sums[q] = each_mul(sums[q], before);
        }
        if (seen[kNum - 1] == 0) break;
        mix_tile<kNum, Dims>(block.values + t * block.tile_step(), first_dim, dim, block.scores + first * stride + t * kKvTile,
                             stride, seen, sums);
    }
#pragma unroll
    for (int q = 0; q < kNum; q++)
        if (stored[q]) *stored[q] = place.alone ? each_add(sums[q], 0.0f) : sums[q];
}

template <class Value, int kQueries, int kDim>
__device__ __forceinline__ void mix_chunk(const WindowBlock<Value, kQueries, kDim>& block, int first_tile, int span,
                                          const MixPlace& place) {
    using Dims = MixDims<kQueries>;
    constexpr int kNum = kMixQueries<kQueries>, kDims = sizeof(Dims) / sizeof(float);
    const int num_items = block.head_dim() / kDims;
#pragma unroll 1
    for (int item = block.thread(); item < kQueries / kNum * num_items; item += block.num_threads()) {
        const int first = item / num_items * kNum;
        if (block.row_of(first) < block.num_rows)
            mix_item<kNum, Dims>(block, first, item % num_items * kDims, first_tile, span, place);
    }
}

}  // namespace tandem::cuda
