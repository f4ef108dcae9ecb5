// One row to half precision by one warp.
#pragma once
#include <cuda_fp16.h>

#include "cuda_ops/half_rows.h"

namespace tandem::cuda {

__device__ __forceinline__ uint16_t half_bits(float x) {
    return __half_as_ushort(__float2half_rn(x));
}

// Two neighbours in one word, the first one low.
__device__ __forceinline__ uint32_t half_pair(float low, float high) {
    return half_bits(low) | static_cast<uint32_t>(half_bits(high)) << 16;
}

// All 32 lanes call together. `x`: [width] floats, 8-byte aligned; `values`: [width].
__device__ __forceinline__ void halve_row(const float* x, uint16_t* values, float* scale, int width, int lane) {
    const auto* pairs = reinterpret_cast<const float2*>(x);
    uint32_t amax = 0;
#pragma unroll 4
    for (int i = lane; i < width / 2; i += 32) {
        const float2 pair = pairs[i];
        amax = max(amax, max(quant::float_bits(pair.x) & 0x7fffffff, quant::float_bits(pair.y) & 0x7fffffff));
    }
    const HalfScale scales = half_scale(__reduce_max_sync(~0u, amax));
    if (lane == 0) *scale = scales.scale;
    const bool zero = scales.inverse == 0.0f;  // NaN * 0 is no zero
#pragma unroll 4
    for (int i = lane; i < width / 2; i += 32) {
        const float2 pair = pairs[i];
        const uint32_t halves = half_pair(quant::mul(pair.x, scales.inverse), quant::mul(pair.y, scales.inverse));
        reinterpret_cast<uint32_t*>(values)[i] = zero ? 0 : halves;
    }
}

}  // namespace tandem::cuda
