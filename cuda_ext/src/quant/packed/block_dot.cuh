// A packed block by a block of activations: the block's value (docs/arithmetic.md), by dp4a.
#pragma once
#include "quant/arithmetic.h"
#include "quant/packed/packed.cuh"
#include "quant/row.h"

namespace tandem::quant {

struct ActBlock {
    uint32_t q[8];
    float d;
    int sum[2];  // of the first and the last sixteen q
};

// `turned` 1: the last sixteen values first. Where lanes take neighbouring places and those from 4 on turn theirs, no two of them
// meet in a bank of shared memory.
__device__ __forceinline__ ActBlock load_act_block(const ActGroup& group, int place, int turned) {
    const auto* q = reinterpret_cast<const uint4*>(group.q + kBlock * place);
    const uint4 first = q[turned], last = q[1 - turned];
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

// The term of a block: its value times the activations' scale.
template <class T>
__device__ __forceinline__ float block_term(const uint32_t (&w)[8], const PackedScale& s, const ActBlock& x) {
    int first = 0, last = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        first = dot_bytes(w[k], x.q[k], first);
        last = dot_bytes(w[k + 4], x.q[k + 4], last);
    }
    return mul(x.d, packed_value<T>(first, last, s, x.sum[0], x.sum[1]));
}

}  // namespace tandem::quant
