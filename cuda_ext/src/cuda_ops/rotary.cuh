// One warp norms and rotates one head, in the order of ops/rotary.h; the values of a key/value cache.
#pragma once
#include <cstdint>

#include "device/primitives.cuh"
#include "ops/vector.h"
#include "quant/scalar.h"

namespace tandem::cuda {

constexpr int kWarpLanes = 32;
constexpr uint32_t kWholeWarp = ~0u;

// A value of the cache: rounded once on its way in, exact on its way out.
template <class Value>
struct KvValues;

template <>
struct KvValues<__half> {
    using Pair = __half2;
    static __device__ __forceinline__ __half narrow(float x) { return __float2half_rn(x); }
    static __device__ __forceinline__ float2 widen(const Pair& pair) { return {__low2float(pair), __high2float(pair)}; }
};

template <>
struct KvValues<float> {
    using Pair = float2;
    static __device__ __forceinline__ float narrow(float x) { return x; }
    static __device__ __forceinline__ float2 widen(const Pair& pair) { return pair; }
};

// 1 / sqrt(mean of squares + eps); lane l has values l, l + 32, ... of head_dim (a multiple of 32).
__device__ __forceinline__ float inverse_rms_of(const float (&x)[kMaxHeadDim / kWarpLanes], int head_dim, float eps) {
    using namespace quant;
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kMaxHeadDim / kWarpLanes; k++)
        if (k * kWarpLanes < head_dim) sum = add(sum, mul(x[k], x[k]));
    for (int width = kWarpLanes / 2; width > 0; width /= 2) sum = add(sum, __shfl_xor_sync(kWholeWarp, sum, width));
    return div(1.0f, __fsqrt_rn(add(div(sum, static_cast<float>(head_dim)), eps)));
}

// x: [head_dim] in global memory, written by an earlier kernel; gamma: [head_dim] or null; angles: [head_dim / 2] (cosine, sine) of
// the position. out: [head_dim] in shared memory, complete for every lane of the warp on return.
__device__ __forceinline__ void turn_head(const float* x, const float* gamma, float eps, const float2* angles, int head_dim,
                                          int lane, float* out) {
    using namespace quant;
    float values[kMaxHeadDim / kWarpLanes];
#pragma unroll
    for (int k = 0; k < kMaxHeadDim / kWarpLanes; k++)
        values[k] = k * kWarpLanes < head_dim ? __ldcg(x + k * kWarpLanes + lane) : 0.0f;
    const float inverse = gamma ? inverse_rms_of(values, head_dim, eps) : 1.0f;
#pragma unroll
    for (int k = 0; k < kMaxHeadDim / kWarpLanes; k++) {
        const int i = k * kWarpLanes + lane;
        if (i < head_dim) out[i] = gamma ? mul(mul(values[k], gamma[i]), inverse) : values[k];
    }
    __syncwarp();
    const int half = head_dim / 2;
    for (int i = lane; i < half; i += kWarpLanes) {
        const float2 turn = angles[i];
        const float a = out[i], b = out[i + half];
        out[i] = add(mul(a, turn.x), -mul(b, turn.y));
        out[i + half] = add(mul(b, turn.x), mul(a, turn.y));
    }
    __syncwarp();
}

}  // namespace tandem::cuda
