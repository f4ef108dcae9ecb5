// The spans of a part's queries, one after the other (ops/attention.h), and the quantisation of the result.
#pragma once
#include "cuda_ops/attention_window_span.cuh"

namespace tandem::cuda {

// The scratch of a launch: out [rows, heads, spans, head_dim], then states [rows, heads, spans].
struct WindowSpans {
    float* out;
    SoftmaxState* states;
    int64_t num_spans;
    int query_heads;
    int head_dim;

    __device__ static WindowSpans of(const AttentionWindowProblem& p) {
        const int64_t rows = int64_t{p.num_rows} * p.query_heads * p.num_spans;
        return {p.spans, reinterpret_cast<SoftmaxState*>(p.spans + rows * p.kv.head_dim), p.num_spans, p.query_heads,
                p.kv.head_dim};
    }
    __device__ int64_t index(int row, int head, int span) const { return (int64_t{row} * query_heads + head) * num_spans + span; }
    __device__ float* out_of(int row, int head, int span) const { return out + index(row, head, span) * head_dim; }
};

// Counts this block as through. True in every thread of the last block of the part, which then sees what the others wrote.
template <class Block>
__device__ __forceinline__ bool last_of_part(const Block& block, uint32_t* counter, uint32_t num_blocks) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        *block.last = atomicAdd(counter, 1u) + 1 == num_blocks;
        if (*block.last) *counter = 0;
    }
    __syncthreads();
    const bool last = *block.last != 0;
    if (last) __threadfence();
    return last;
}

// Factors of up to kMergeSpans spans of one query, from `begin` on: a_k for what was merged before, b_k for span k, at
// factors[k] and factors[kMergeSpans + k]. One warp; lane k has span begin + k. Returns the state after them.
__device__ __forceinline__ SoftmaxState span_factors(const SoftmaxState* states, int num, SoftmaxState total, int lane,
                                                     float* factors) {
    using namespace quant;
    SoftmaxState span{-INFINITY, 0.0f};
    if (lane < num) {
        const float2 stored = __ldcg(reinterpret_cast<const float2*>(states + lane));
        span = {stored.x, stored.y};
    }
    float max = span.max;
#pragma unroll
    for (int step = 1; step < kWarpLanes; step *= 2) {
        const float below = __shfl_up_sync(kWholeWarp, max, step);
        if (lane >= step) max = fmaxf(max, below);
    }
    max = fmaxf(max, total.max);
    const float previous = __shfl_up_sync(kWholeWarp, max, 1), max_before = lane == 0 ? total.max : previous;
    const float a = exp_clamped(add(max_before, -max)), b = exp_clamped(add(span.max, -max)), scaled = mul(span.sum, b);
    factors[lane] = a;
    factors[kMergeSpans + lane] = b;
#pragma unroll 1
    for (int k = 0; k < num; k++) total.sum = fma(total.sum, __shfl_sync(kWholeWarp, a, k), __shfl_sync(kWholeWarp, scaled, k));
    total.max = __shfl_sync(kWholeWarp, max, kWarpLanes - 1);
    return total;
}

// Spans that query q sees of those from `begin` on, at most kMergeSpans.
template <class Block>
__device__ __forceinline__ int spans_seen(const Block& block, int q, int begin) {
    return max(0, min(kMergeSpans, (block.position + block.row_of(q)) / kSpan + 1 - begin));
}

// out: [num, head_dim] of one query, from the batch's first span on; two dimensions. All loads are under way before the first is
// needed: they come from the L2 cache, one after the other they would take longer than the rest of the kernel.
__device__ __forceinline__ float2 merge_pair(const float* out, int head_dim, const float* factors, int num, float2 sum) {
    using namespace quant;
    float2 spans[kMergeSpans];
#pragma unroll
    for (int k = 0; k < kMergeSpans; k++)
        if (k < num) spans[k] = __ldcg(reinterpret_cast<const float2*>(out + k * head_dim));
#pragma unroll
    for (int k = 0; k < kMergeSpans; k++) {
        if (k >= num) break;
        const float a = factors[k], b = factors[kMergeSpans + k];
        sum = {fma(sum.x, a, mul(spans[k].x, b)), fma(sum.y, a, mul(spans[k].y, b))};
    }
    return sum;
}

// Leaves the sums of all spans in block.out and their states in block.states.
template <class Value, int kQueries, int kDim>
__device__ __forceinline__ void merge_spans(const WindowBlock<Value, kQueries, kDim>& block, const WindowSpans& spans) {
    const int pairs = block.head_dim() / 2;
    auto* out = reinterpret_cast<float2*>(block.out);
    const auto factors_of = [&](int q) { return block.scores + q * 2 * kMergeSpans; };
#pragma unroll 1
    for (int begin = 0; begin < block.num_spans(); begin += kMergeSpans) {
#pragma unroll 1
        for (int q = block.warp; q < kQueries; q += block.num_warps) {
            if (!block.exists(q)) continue;
            const SoftmaxState total = begin == 0 ? SoftmaxState{-INFINITY, 0.0f} : block.states[q];
            const SoftmaxState* states = spans.states + spans.index(block.row_of(q), block.head_of(q), begin);
            const SoftmaxState merged = span_factors(states, spans_seen(block, q, begin), total, block.lane, factors_of(q));
            __syncwarp();
            if (block.lane == 0) block.states[q] = merged;
        }
        __syncthreads();
#pragma unroll 1
        for (int item = block.thread(); item < kQueries * pairs; item += block.num_threads()) {
            const int q = item / pairs;
            if (!block.exists(q)) continue;
            const float* from = spans.out_of(block.row_of(q), block.head_of(q), begin) + 2 * (item - q * pairs);
            out[item] = merge_pair(from, block.head_dim(), factors_of(q), spans_seen(block, q, begin),
                                   begin == 0 ? float2{0.0f, 0.0f} : out[item]);
        }
        __syncthreads();
    }
}

// One warp quantises 32 values, one per lane, into block `at` (among all of the row) of `groups`.
__device__ __forceinline__ void quantise_block32(float x, quant::ActGroup* groups, int at, int lane) {
    using namespace quant;
    const uint32_t amax = __reduce_max_sync(kWholeWarp, float_bits(x) & 0x7fffffffu);
    const BlockScales scales = block_scales(amax, 1.0f);
    const int q = scales.inverse == 0.0f ? 0 : round_int(mul(x, scales.inverse));
    int sum = q;
    for (int width = 8; width > 0; width /= 2) sum += __shfl_xor_sync(kWholeWarp, sum, width);
    ActGroup& group = groups[at / kBlocks];
    const int place = at % kBlocks;
    group.q[place * kBlock + lane] = static_cast<int8_t>(q);
    if (lane % 16 == 0) group.sum16[2 * place + lane / 16] = static_cast<int16_t>(sum);
    if (lane == 0) group.d[place] = scales.d;
}

// out * (1 / sum) of the part's queries, as floats and quantised; zero blocks behind the row's last head.
template <class Value, int kQueries, int kDim>
__device__ __forceinline__ void finish_part(const WindowBlock<Value, kQueries, kDim>& block, const AttentionWindowProblem& p) {
    constexpr int kBlock = quant::kBlock;
    const int blocks = block.head_dim() / kBlock, width = p.query_heads * block.head_dim();
    const int num_groups = (width + kGroupValues - 1) / kGroupValues;
#pragma unroll 1
    for (int item = block.warp; item < kQueries * blocks; item += block.num_warps) {
        const int q = item / blocks, row = block.row_of(q), within = (item - q * blocks) * kBlock + block.lane;
        if (!block.exists(q)) continue;
        const float inverse = quant::div(1.0f, block.states[q].sum);
        const float x = quant::mul(block.out[q * block.head_dim() + within], inverse);
        const int at = block.head_of(q) * block.head_dim() + within;
        if (p.out) p.out[row * width + at] = x;
        if (p.groups) quantise_block32(x, p.groups + row * num_groups, at / kBlock, block.lane);
    }
    if (!p.groups || width % kGroupValues == 0 || block.first_head + block.num_heads < p.query_heads) return;
    const int padding = num_groups * quant::kBlocks - width / kBlock;
#pragma unroll 1
    for (int item = block.warp; item < block.num_rows * padding; item += block.num_warps)
        quantise_block32(0.0f, p.groups + item / padding * num_groups, width / kBlock + item % padding, block.lane);
}

}  // namespace tandem::cuda
