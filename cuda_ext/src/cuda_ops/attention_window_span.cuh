// One chunk of a span: scores, softmax and the sum of values, in the order of attend_tile (ops/vector.h).
//
// Scores are chains over the head's dimensions, one per (position, query); value sums chains over positions, one per
// (dimension, query). Lanes take neighbouring positions, two each, then neighbouring dimensions.
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

// scores[q][2 lane], [2 lane + 1] of one tile for kNum queries.
template <int kNum, class Value>
__device__ __forceinline__ void score_tile(const Value* keys, const float* query, int head_dim, float scale, int lane,
                                           float* scores, int stride) {
    using Pair = typename KvValues<Value>::Pair;
    const Pair* pairs = reinterpret_cast<const Pair*>(keys) + lane;
    float2 sums[kNum] = {};
#pragma unroll 4
    for (int d = 0; d < head_dim; d += 4) {
        float2 key[4];
#pragma unroll
        for (int i = 0; i < 4; i++) key[i] = KvValues<Value>::widen(pairs[(d + i) * (kKvTile / 2)]);
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
#pragma unroll
    for (int q = 0; q < kNum; q++)
        reinterpret_cast<float2*>(scores + q * stride)[lane] = {quant::mul(sums[q].x, scale), quant::mul(sums[q].y, scale)};
}

// Each warp takes one tile of the chunk for one half of the queries.
template <class Value, int kQueries, int kDim>
__device__ __forceinline__ void score_chunk(const WindowBlock<Value, kQueries, kDim>& block, float scale, int first_tile) {
    constexpr int kNum = kScoreQueries<kQueries>;
    const bool upper = block.warp >= block.chunk_tiles;
    const int tile = upper ? block.warp - block.chunk_tiles : block.warp, first = upper ? kNum : 0;
    if (block.row_of(first) >= block.num_rows || block.seen(block.num_rows - 1, first_tile + tile) == 0) return;
    const int stride = block.chunk_tiles * kKvTile, dim = block.head_dim();
    score_tile<kNum>(block.keys + tile * kKvTile * dim, block.query + first * dim, dim, scale, block.lane,
                     block.scores + first * stride + tile * kKvTile, stride);
}

// Eight chains per tile, chain j of tile t in lane 8 t + j, then the tree of sum8: lane 8 t has the sum of tile t.
__device__ __forceinline__ float tile_sums(const float* weights, int num_tiles, int lane) {
    using quant::add;
    float sum = 0.0f;
    if (lane / 8 < num_tiles) {
#pragma unroll
        for (int i = 0; i < kKvTile; i += 8) sum = add(sum, weights[lane / 8 * kKvTile + i + lane % 8]);
    }
    sum = add(sum, __shfl_xor_sync(kWholeWarp, sum, 4));
    sum = add(sum, __shfl_xor_sync(kWholeWarp, sum, 2));
    return add(sum, __shfl_xor_sync(kWholeWarp, sum, 1));
}

__device__ __forceinline__ float warp_max(float x) {
    for (int width = kWarpLanes / 2; width > 0; width /= 2) x = fmaxf(x, __shfl_xor_sync(kWholeWarp, x, width));
    return x;
}

// One warp turns a query's scores of a chunk into exp(score - max'), zero where the row sees nothing, and updates the state.
template <class Block>
__device__ __forceinline__ void advance_query(const Block& block, int q, int first_tile) {
    using quant::add;
    float* scores = block.scores + q * block.chunk_tiles * kKvTile;
    SoftmaxState state = block.states[q];
    float most[kSpanTiles];
    const int seen = block.position + block.row_of(q) + 1 - first_tile * kKvTile;  // of the chunk, from its beginning
#pragma unroll
    for (int t = 0; t < kSpanTiles; t++) {
        if (t >= block.chunk_tiles) break;
        const int j = t * kKvTile + block.lane, k = j + kWarpLanes;
        most[t] = warp_max(fmaxf(j < seen ? scores[j] : -INFINITY, k < seen ? scores[k] : -INFINITY));
    }
    float before = 1.0f;  // lane t keeps that of tile t
#pragma unroll
    for (int t = 0; t < kSpanTiles; t++) {
        if (t >= block.chunk_tiles) break;
        const float max = fmaxf(state.max, most[t]), factor = t * kKvTile < seen ? quant::exp_clamped(add(state.max, -max)) : 1.0f;
        if (block.lane == t) before = factor;
        state.max = max;
        for (int j = t * kKvTile + block.lane; j < (t + 1) * kKvTile; j += kWarpLanes)
            scores[j] = j < seen ? quant::exp_clamped(add(scores[j], -max)) : 0.0f;
    }
    __syncwarp();
    const float sum = tile_sums(scores, block.chunk_tiles, block.lane);
#pragma unroll
    for (int t = 0; t < kSpanTiles; t++) {
        if (t >= block.chunk_tiles) break;
        const float factor = __shfl_sync(kWholeWarp, before, t), of_tile = __shfl_sync(kWholeWarp, sum, 8 * t);
        if (t * kKvTile < seen) state.sum = quant::fma(state.sum, factor, of_tile);
    }
    if (block.lane < kSpanTiles) block.before[q * kSpanTiles + block.lane] = before;
    if (block.lane == 0) block.states[q] = state;
}

template <class Value, int kQueries, int kDim>
__device__ __forceinline__ void advance_chunk(const WindowBlock<Value, kQueries, kDim>& block, int first_tile) {
#pragma unroll 1
    for (int q = block.warp; q < kQueries; q += block.num_warps)
        if (block.exists(q)) advance_query(block, q, first_tile);
}

// kWidth neighbouring values of the cache.
template <int kWidth, class Value>
struct ValuesAt {
    using Stored = std::conditional_t<kWidth == 1, Value, typename KvValues<Value>::Pair>;
    Stored stored;

    __device__ __forceinline__ explicit ValuesAt(const Value* values) : stored(*reinterpret_cast<const Stored*>(values)) {}
    __device__ __forceinline__ void widen(float (&out)[kWidth]) const {
        if constexpr (kWidth == 1) {
            out[0] = static_cast<float>(stored);
        } else {
            const float2 pair = KvValues<Value>::widen(stored);
            out[0] = pair.x;
            out[1] = pair.y;
        }
    }
};

// sums[q] of one tile for kNum queries and the kWidth dimensions at `values`. Rows rise with q: the first query sees least.
template <int kNum, int kWidth, class Value>
__device__ __forceinline__ void mix_tile(const Value* values, int head_dim, const float* weights, int stride,
                                         const int (&seen)[kNum], float (&sums)[kNum][kWidth]) {
    constexpr int kStep = 8;
    const int common = seen[0] & ~(kStep - 1), most = seen[kNum - 1];
#pragma unroll 2
    for (int begin = 0; begin < common; begin += kStep) {
        float value[kStep][kWidth];
#pragma unroll
        for (int i = 0; i < kStep; i++) ValuesAt<kWidth, Value>(values + (begin + i) * head_dim).widen(value[i]);
#pragma unroll
        for (int q = 0; q < kNum; q++) {
#pragma unroll
            for (int four = 0; four < kStep; four += 4) {
                const float4 w = *reinterpret_cast<const float4*>(weights + q * stride + begin + four);
                const float weight[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
                for (int i = 0; i < 4; i++)
#pragma unroll
                    for (int d = 0; d < kWidth; d++) sums[q][d] = quant::fma(weight[i], value[four + i][d], sums[q][d]);
            }
        }
    }
#pragma unroll 1
    for (int j = common; j < most; j++) {
        float value[kWidth];
        ValuesAt<kWidth, Value>(values + j * head_dim).widen(value);
#pragma unroll
        for (int q = 0; q < kNum; q++) {
            if (j >= seen[q]) continue;
#pragma unroll
            for (int d = 0; d < kWidth; d++) sums[q][d] = quant::fma(weights[q * stride + j], value[d], sums[q][d]);
        }
    }
}

// Where sums of values lie between the chunks of a span and behind its last: in the scratch, so that shared memory is left for
// another block.
struct MixPlace {
    bool first;   // chunk of the span: sums start at zero
    float* sums;  // of (row 0, head 0)
    int64_t row;  // floats from a row to the next
    int64_t head;
};

// kNum queries from `first` on, kWidth dimensions from `dim` on.
template <int kNum, int kWidth, class Block>
__device__ __forceinline__ void mix_item(const Block& block, int first, int dim, int first_tile, int span, const MixPlace& place) {
    const int head_dim = block.head_dim(), stride = block.chunk_tiles * kKvTile;
    float* stored[kNum];
    float sums[kNum][kWidth];
#pragma unroll
    for (int q = 0; q < kNum; q++) {
        const int row = block.row_of(first + q);
        const bool wanted = block.exists(first + q) && block.sees_span(row, span);
        stored[q] = wanted ? place.sums + row * place.row + block.head_of(first + q) * place.head + dim : nullptr;
#pragma unroll
        for (int d = 0; d < kWidth; d++) sums[q][d] = stored[q] && !place.first ? stored[q][d] : 0.0f;
    }
#pragma unroll 1
    for (int t = 0; t < block.chunk_tiles; t++) {
        int seen[kNum];
#pragma unroll
        for (int q = 0; q < kNum; q++) {
            seen[q] = block.seen(min(block.row_of(first + q), block.num_rows - 1), first_tile + t);
            const float before = block.before[(first + q) * kSpanTiles + t];
#pragma unroll
            for (int d = 0; d < kWidth; d++) sums[q][d] = quant::mul(sums[q][d], before);
        }
        if (seen[kNum - 1] == 0) break;
        mix_tile<kNum, kWidth>(block.values + t * kKvTile * head_dim + dim, head_dim,
                               block.scores + first * stride + t * kKvTile, stride, seen, sums);
    }
#pragma unroll
    for (int q = 0; q < kNum; q++)
        if (stored[q])
#pragma unroll
            for (int d = 0; d < kWidth; d++) stored[q][d] = sums[q][d];
}

template <int kWidth, class Value, int kQueries, int kDim>
__device__ __forceinline__ void mix_by(const WindowBlock<Value, kQueries, kDim>& block, int first_tile, int span,
                                       const MixPlace& place) {
    constexpr int kNum = kMixQueries<kQueries>;
    const int per_head = block.head_dim() / kWidth;
#pragma unroll 1
    for (int item = block.thread(); item < kQueries / kNum * per_head; item += block.num_threads()) {
        const int first = item / per_head * kNum;
        if (block.row_of(first) < block.num_rows)
            mix_item<kNum, kWidth>(block, first, item % per_head * kWidth, first_tile, span, place);
    }
}

// A chain per thread where there are threads enough, else two.
template <class Value, int kQueries, int kDim>
__device__ __forceinline__ void mix_chunk(const WindowBlock<Value, kQueries, kDim>& block, int first_tile, int span,
                                          const MixPlace& place) {
    if (kQueries / kMixQueries<kQueries> * block.head_dim() <= block.num_threads())
        mix_by<1>(block, first_tile, span, place);
    else
        mix_by<2>(block, first_tile, span, place);
}

}  // namespace tandem::cuda
