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

// scores[q][2 lane], [2 lane + 1] of one tile for kNum queries.
template <int kNum, class Value>
__device__ __forceinline__ void score_tile(const Value* keys, const float* query, int head_dim, float scale, int lane,
                                           float* scores, int stride) {
    using Pair = typename KvValues<Value>::Pair;
    const Pair* pairs = reinterpret_cast<const Pair*>(keys) + lane;
    float2 sums[kNum] = {};
#pragma unroll 2
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
template <int kQueries, class Value>
__device__ __forceinline__ void score_chunk(const WindowBlock<Value>& block, float scale, int64_t first_tile) {
    constexpr int kNum = kScoreQueries<kQueries>;
    const int tile = block.warp % block.chunk_tiles, first = block.warp / block.chunk_tiles * kNum, dim = block.head_dim;
    if (first >= block.num_queries || block.seen(block.num_rows - 1, first_tile + tile) == 0) return;
    const int stride = block.chunk_tiles * kKvTile;
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
template <class Value>
__device__ __forceinline__ void advance_query(const WindowBlock<Value>& block, int q, int64_t first_tile) {
    using quant::add;
    float* scores = block.scores + q * block.chunk_tiles * kKvTile;
    SoftmaxState state = block.states[q];
    float score[kSpanTiles][2], most[kSpanTiles], before[kSpanTiles];
    int seen[kSpanTiles];
#pragma unroll
    for (int t = 0; t < kSpanTiles; t++) {
        seen[t] = t < block.chunk_tiles ? block.seen(block.row_of(q), first_tile + t) : 0;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int j = half * kWarpLanes + block.lane;
            score[t][half] = j < seen[t] ? scores[t * kKvTile + j] : -INFINITY;
        }
        most[t] = warp_max(fmaxf(score[t][0], score[t][1]));
    }
#pragma unroll
    for (int t = 0; t < kSpanTiles; t++) {
        const float max = fmaxf(state.max, most[t]);
        before[t] = seen[t] > 0 ? quant::exp_clamped(add(state.max, -max)) : 1.0f;
        state.max = max;
        if (t >= block.chunk_tiles) continue;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int j = half * kWarpLanes + block.lane;
            scores[t * kKvTile + j] = j < seen[t] ? quant::exp_clamped(add(score[t][half], -max)) : 0.0f;
        }
    }
    __syncwarp();
    const float sum = tile_sums(scores, block.chunk_tiles, block.lane);
#pragma unroll
    for (int t = 0; t < kSpanTiles; t++) {
        const float of_tile = __shfl_sync(kWholeWarp, sum, 8 * t);
        if (seen[t] > 0) state.sum = quant::fma(state.sum, before[t], of_tile);
        if (block.lane == t) block.before[q * kSpanTiles + t] = before[t];
    }
    if (block.lane == 0) block.states[q] = state;
}

template <class Value>
__device__ __forceinline__ void advance_chunk(const WindowBlock<Value>& block, int64_t first_tile) {
    for (int q = block.warp; q < block.num_queries; q += block.num_warps) advance_query(block, q, first_tile);
}

// sums[q] of one tile for kNum queries and the two dimensions at `values`. Rows rise with q: the first query sees least.
template <int kNum, class Value>
__device__ __forceinline__ void mix_tile(const Value* values, int head_dim, const float* weights, int stride,
                                         const int (&seen)[kNum], float2 (&sums)[kNum]) {
    using Pair = typename KvValues<Value>::Pair;
    const int common = seen[0] & ~3, most = seen[kNum - 1];
    const auto pair_at = [&](int j) { return KvValues<Value>::widen(*reinterpret_cast<const Pair*>(values + j * head_dim)); };
#pragma unroll 2
    for (int begin = 0; begin < common; begin += 4) {
        float2 value[4];
#pragma unroll
        for (int i = 0; i < 4; i++) value[i] = pair_at(begin + i);
#pragma unroll
        for (int q = 0; q < kNum; q++) {
            const float4 w = *reinterpret_cast<const float4*>(weights + q * stride + begin);
            const float four[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                sums[q].x = quant::fma(four[i], value[i].x, sums[q].x);
                sums[q].y = quant::fma(four[i], value[i].y, sums[q].y);
            }
        }
    }
    for (int j = common; j < most; j++) {
        const float2 value = pair_at(j);
#pragma unroll
        for (int q = 0; q < kNum; q++) {
            if (j >= seen[q]) continue;
            const float weight = weights[q * stride + j];
            sums[q] = {quant::fma(weight, value.x, sums[q].x), quant::fma(weight, value.y, sums[q].y)};
        }
    }
}

// Where the sums of values of a chunk come from and go to.
struct MixEnds {
    bool first;    // of the span: sums start at zero, else at block.out
    bool last;     // of the span: sums go to the scratch, else to block.out
    float* spans;  // the span's out of (row 0, head 0)
    int64_t row;   // floats from a row to the next in the scratch
    int64_t head;  // floats from a head to the next
};

// kNum queries from `first` on, dimensions 2 pair and 2 pair + 1.
template <int kNum, class Value>
__device__ __forceinline__ void mix_item(const WindowBlock<Value>& block, int first, int pair, int64_t first_tile, int64_t span,
                                         const MixEnds& ends) {
    const int dim = block.head_dim, stride = block.chunk_tiles * kKvTile, num = min(kNum, block.num_queries - first);
    float2* stored = reinterpret_cast<float2*>(block.out + first * dim) + pair;
    float2 sums[kNum];
    for (int q = 0; q < kNum; q++) sums[q] = ends.first ? float2{0.0f, 0.0f} : stored[q * (dim / 2)];
    for (int t = 0; t < block.chunk_tiles; t++) {
        int seen[kNum];
#pragma unroll
        for (int q = 0; q < kNum; q++) {
            seen[q] = block.seen(block.row_of(first + min(q, num - 1)), first_tile + t);
            const float before = block.before[(first + q) * kSpanTiles + t];
            sums[q] = {quant::mul(sums[q].x, before), quant::mul(sums[q].y, before)};
        }
        if (seen[kNum - 1] == 0) break;
        mix_tile<kNum>(block.values + t * kKvTile * dim + 2 * pair, dim, block.scores + first * stride + t * kKvTile, stride, seen,
                       sums);
    }
#pragma unroll
    for (int q = 0; q < kNum; q++) {
        if (!ends.last) {
            stored[q * (dim / 2)] = sums[q];
        } else if (q < num && block.sees_span(block.row_of(first + q), span)) {
            float* out = ends.spans + block.row_of(first + q) * ends.row + block.head_of(first + q) * ends.head;
            reinterpret_cast<float2*>(out)[pair] = sums[q];
        }
    }
}

template <int kQueries, class Value>
__device__ __forceinline__ void mix_chunk(const WindowBlock<Value>& block, int64_t first_tile, int64_t span, const MixEnds& ends) {
    constexpr int kNum = kMixQueries<kQueries>;
    const int pairs = block.head_dim / 2, items = (block.num_queries + kNum - 1) / kNum * pairs;
    for (int item = static_cast<int>(threadIdx.x); item < items; item += static_cast<int>(blockDim.x))
        mix_item<kNum>(block, item / pairs * kNum, item % pairs, first_tile, span, ends);
}

}  // namespace tandem::cuda
