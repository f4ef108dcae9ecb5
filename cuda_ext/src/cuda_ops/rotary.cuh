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

// The length of a head: known when compiled, or 0 and `at_run_time`.
template <int kDim>
__device__ __forceinline__ int head_length(int at_run_time) {
    return kDim > 0 ? kDim : at_run_time;
}

// Values of a head that a lane has: lane, lane + 32, ...
template <int kDim>
constexpr int kLaneValues = (kDim > 0 ? kDim : kMaxHeadDim) / kWarpLanes;

// 1 / sqrt(mean of squares + eps) of a head whose length is a multiple of 32.
template <int kNum>
__device__ __forceinline__ float inverse_rms_of(const float (&x)[kNum], int length, float eps) {
    using namespace quant;
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kNum; k++)
        if (k * kWarpLanes < length) sum = add(sum, mul(x[k], x[k]));
#pragma unroll
    for (int width = kWarpLanes / 2; width > 0; width /= 2) sum = add(sum, __shfl_xor_sync(kWholeWarp, sum, width));
    return div(1.0f, __fsqrt_rn(add(div(sum, static_cast<float>(length)), eps)));
}

// How a head is turned: what no kernel writes, so that it may be on its way before wait_prerequisites().
template <int kDim>
struct Turn {
    bool has_gamma;
    float gamma[kLaneValues<kDim>];              // of the lane's values
    float2 angles[(kLaneValues<kDim> + 1) / 2];  // (cosine, sine)
};

// gamma: [length] or null; angles: [length / 2] of the position.
template <int kDim>
__device__ __forceinline__ Turn<kDim> fetch_turn(const float* gamma, const float2* angles, int head_dim, int lane) {
    constexpr int kNum = kLaneValues<kDim>;
    const int length = head_length<kDim>(head_dim);
    Turn<kDim> turn{gamma != nullptr, {}, {}};
#pragma unroll
    for (int k = 0; k < kNum; k++)
        if (gamma && k * kWarpLanes < length) turn.gamma[k] = __ldg(gamma + k * kWarpLanes + lane);
#pragma unroll
    for (int k = 0; k < (kNum + 1) / 2; k++)
        if (k * kWarpLanes + lane < length / 2) turn.angles[k] = __ldg(angles + k * kWarpLanes + lane);
    return turn;
}

// x: [length] in global memory, written by an earlier kernel. out: [length] in shared memory, complete for every lane of the warp
// on return.
template <int kDim>
__device__ __forceinline__ void turn_head(const float* x, const Turn<kDim>& turn, float eps, int head_dim, int lane, float* out) {
    using namespace quant;
    constexpr int kNum = kLaneValues<kDim>;
    const int length = head_length<kDim>(head_dim), half = length / 2;
    float values[kNum];
#pragma unroll
    for (int k = 0; k < kNum; k++) values[k] = k * kWarpLanes < length ? __ldcg(x + k * kWarpLanes + lane) : 0.0f;
    const float inverse = turn.has_gamma ? inverse_rms_of(values, length, eps) : 1.0f;
#pragma unroll
    for (int k = 0; k < kNum; k++) {
        const int i = k * kWarpLanes + lane;
        if (k * kWarpLanes < length) out[i] = turn.has_gamma ? mul(mul(values[k], turn.gamma[k]), inverse) : values[k];
    }
    __syncwarp();
#pragma unroll
    for (int k = 0; k < (kNum + 1) / 2; k++) {
        const int i = k * kWarpLanes + lane;
        if (i >= half) break;
        const float2 angle = turn.angles[k];
        const float a = out[i], b = out[i + half];
        out[i] = add(mul(a, angle.x), -mul(b, angle.y));
        out[i + half] = add(mul(b, angle.x), mul(a, angle.y));
    }
    __syncwarp();
}

}  // namespace tandem::cuda
