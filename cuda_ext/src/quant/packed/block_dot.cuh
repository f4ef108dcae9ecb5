// A packed block by a block of activations: the block's value (docs/arithmetic.md), by dp4a.
#pragma once
#include "quant/arithmetic.h"
#include "quant/packed/packed.cuh"
#include "quant/shared_group.cuh"

namespace tandem::quant {

struct ActBlock {
    uint32_t q[8];
    float d;
    int sum[2];  // of the first and the last sixteen q
};

// `turned` 1: the last sixteen values first. Where lanes take neighbouring places and the odd ones turn theirs, no two of them
// meet in a bank of shared memory.
__device__ __forceinline__ ActBlock load_act_block(const SharedGroup& group, int place, int turned) {
    const auto* q = reinterpret_cast<const uint4*>(group.q);
    const uint4 first = q[shared_unit(2 * place + turned)], last = q[shared_unit(2 * place + 1 - turned)];
    const uint32_t stored = *reinterpret_cast<const uint32_t*>(group.sum16 + 2 * place);
    const uint32_t sums = __funnelshift_r(stored, stored, 16 * turned);
    return {{first.x, first.y, first.z, first.w, last.x, last.y, last.z, last.w},
            group.d[place],
            {static_cast<int16_t>(sums & 0xffff), static_cast<int16_t>(sums >> 16)}};
}

// The weights of a block for activations that are turned.
template <class T>
__device__ __forceinline__ void turn_weights(uint32_t (&w)[8], PackedScale& s, int turned) {
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const uint32_t first = w[k], last = w[k + 4];
        w[k] = turned ? last : first;
        w[k + 4] = turned ? first : last;
    }
    if constexpr (Packed<T>::kHalves) {
        const int scale = s.scale[0], minimum = s.minimum[0];
        s.scale[0] = turned ? s.scale[1] : scale;
        s.scale[1] = turned ? scale : s.scale[1];
        s.minimum[0] = turned ? s.minimum[1] : minimum;
        s.minimum[1] = turned ? minimum : s.minimum[1];
    }
}

__device__ __forceinline__ int dot_bytes(uint32_t a, uint32_t b, int sum) {
    return __dp4a(static_cast<int>(a), static_cast<int>(b), sum);
}

// From the exact dot products of the packed words with the first and the last sixteen q.
template <class T>
__device__ __forceinline__ float packed_value(int first, int last, const PackedScale& s, int sum_first, int sum_last) {
    using P = Packed<T>;
    first = P::kFactor * first - P::kOffset * sum_first;
    last = P::kFactor * last - P::kOffset * sum_last;
    if constexpr (std::is_same_v<T, NVFP4>) {  // its sums exceed 24 bits; the inner product is exact
        const float d_first = mul(s.d, __int2float_rn(s.scale[0])), d_last = mul(s.d, __int2float_rn(s.scale[1]));
        return fma(d_last, __int2float_rn(last), mul(d_first, __int2float_rn(first)));
    } else {
        const int scaled = P::kHalves ? s.scale[0] * first + s.scale[1] * last : s.scale[0] * (first + last);
        if constexpr (T::has_minima) {
            const int minima =
                P::kHalves ? s.minimum[0] * sum_first + s.minimum[1] * sum_last : s.minimum[0] * (sum_first + sum_last);
            return fma(s.d, __int2float_rn(scaled), mul(s.m, __int2float_rn(minima)));
        } else {
            return mul(s.d, __int2float_rn(scaled));
        }
    }
}

// Blocks 2 i and 2 i + 1 of a group.
struct ActPair {
    uint32_t q[2][8];
    float d[2];
    int sum[2][2];
};

__device__ __forceinline__ ActPair load_act_pair(const SharedGroup& group, int i) {
    ActPair x;
#pragma unroll
    for (int c = 0; c < 4; c++) {
        const uint4 chunk = reinterpret_cast<const uint4*>(group.q)[4 * c + i];
        uint32_t* q = x.q[c / 2] + 4 * (c % 2);
        q[0] = chunk.x;
        q[1] = chunk.y;
        q[2] = chunk.z;
        q[3] = chunk.w;
    }
    const float2 d = reinterpret_cast<const float2*>(group.d)[i];
    const uint2 sums = reinterpret_cast<const uint2*>(group.sum16)[i];
    x.d[0] = d.x;
    x.d[1] = d.y;
    x.sum[0][0] = static_cast<int16_t>(sums.x & 0xffff);
    x.sum[0][1] = static_cast<int32_t>(sums.x) >> 16;
    x.sum[1][0] = static_cast<int16_t>(sums.y & 0xffff);
    x.sum[1][1] = static_cast<int32_t>(sums.y) >> 16;
    return x;
}

// The term of a block: its value times the activations' scale.
template <class T>
__device__ __forceinline__ float block_term(const uint32_t (&w)[8], const PackedScale& s, const uint32_t (&q)[8], float d,
                                            const int (&sum)[2]) {
    int first = 0, last = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        first = dot_bytes(w[k], q[k], first);
        last = dot_bytes(w[k + 4], q[k + 4], last);
    }
    return mul(d, packed_value<T>(first, last, s, sum[0], sum[1]));
}

}  // namespace tandem::quant
