// One chunk of a span: scores, softmax and the sum of values, in the order of attend_tile (ops/vector.h).
//
// Scores are chains over the head's dimensions, one per (position, query); value sums chains over positions, one per
// (dimension, query). Lanes take neighbouring positions, then neighbouring dimensions, two each.
#pragma once
#include <cmath>

#include "cuda_ops/attention_window_block.cuh"

namespace tandem::cuda {

// Queries that one warp scores together, and whose values one thread adds together.
template <int num_queries>
constexpr int kScoreQueries = num_queries > kWarpsPerTile ? num_queries / kWarpsPerTile : 1;
template <int num_queries>
constexpr int kMixQueries = num_queries >= 8   ? 4
                            : num_queries >= 4 ? 2
                                               : 1;

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

// sums[q] of one tile for kNum queries and the dimensions 2 pair and 2 pair + 1. Rows rise with q: the first query sees least.
template <int kNum, class Value>
__device__ __forceinline__ void mix_tile(const Value* tile, int pair, int head_dim, const float* weights, int stride,
                                         const int (&seen)[kNum], float2 (&sums)[kNum]) {
    using Pair = typename KvValues<Value>::Pair;
    constexpr int kStep = 16;
    const Value* values = tile + 2 * pair;
    const auto add_step = [&](int begin, const auto& sees) {
        Pair pairs[kStep];
        const ValueScales<Value, kStep> scales(tile, head_dim, 2 * pair / kKvGroup, begin);
#pragma unroll
        for (int i = 0; i < kStep; i++) pairs[i] = *reinterpret_cast<const Pair*>(values + (begin + i) * head_dim);
#pragma unroll
        for (int q = 0; q < kNum; q++) {
#pragma unroll
            for (int four = 0; four < kStep; four += 4) {
                const float4 w = *reinterpret_cast<const float4*>(weights + q * stride + begin + four);
                const float weight[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float2 value = KvValues<Value>::widen(pairs[four + i], scales.of(four + i));
                    if (sees(q, begin + four + i))
                        sums[q] = {quant::fma(weight[i], value.x, sums[q].x), quant::fma(weight[i], value.y, sums[q].y)};
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

// kNum queries from `first` on, dimensions 2 pair and 2 pair + 1.
template <int kNum, class Block>
__device__ __forceinline__ void mix_item(const Block& block, int first, int pair, int first_tile, int span, const MixPlace& place) {
    const int dim = block.head_dim(), stride = block.chunk_tiles * kKvTile;
    float2* stored[kNum];
    float2 sums[kNum];
#pragma unroll
    for (int q = 0; q < kNum; q++) {
        const int row = block.row_of(first + q);
        const bool wanted = block.exists(first + q) && block.sees_span(row, span);
        stored[q] = wanted ? reinterpret_cast<float2*>(place.sums + row * place.row + block.head_of(first + q) * place.head) + pair
                           : nullptr;
        sums[q] = stored[q] && !place.first ? *stored[q] : float2{0.0f, 0.0f};
    }
#pragma unroll 1
    for (int t = 0; t < block.chunk_tiles; t++) {
        int seen[kNum];
#pragma unroll
        for (int q = 0; q < kNum; q++) {
            seen[q] = block.seen(min(block.row_of(first + q), block.num_rows - 1), first_tile + t);
            const float before = block.tiles[(first + q) * kSpanTiles + t].before;
            sums[q] = {quant::mul(sums[q].x, before), quant::mul(sums[q].y, before)};
        }
        if (seen[kNum - 1] == 0) break;
        mix_tile<kNum>(block.values + t * block.tile_step(), pair, dim, block.scores + first * stride + t * kKvTile, stride, seen,
                       sums);
    }
#pragma unroll
    for (int q = 0; q < kNum; q++)
        if (stored[q]) *stored[q] = place.alone ? float2{quant::add(sums[q].x, 0.0f), quant::add(sums[q].y, 0.0f)} : sums[q];
}

template <class Value, int kQueries, int kDim>
__device__ __forceinline__ void mix_chunk(const WindowBlock<Value, kQueries, kDim>& block, int first_tile, int span,
                                          const MixPlace& place) {
    constexpr int kNum = kMixQueries<kQueries>;
    const int pairs = block.head_dim() / 2;
#pragma unroll 1
    for (int item = block.thread(); item < kQueries / kNum * pairs; item += block.num_threads()) {
        const int first = item / pairs * kNum;
        if (block.row_of(first) < block.num_rows) mix_item<kNum>(block, first, item % pairs, first_tile, span, place);
    }
}

}  // namespace tandem::cuda
