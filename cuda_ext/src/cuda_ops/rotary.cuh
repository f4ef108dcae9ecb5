// One warp norms and rotates one head, in the order of ops/rotary.h; the values of a key/value cache.
#pragma once
#include <cstdint>

#include "device/primitives.cuh"
#include "ops/kv_cache.h"
#include "quant/scalar.h"

namespace tandem::cuda {

constexpr int kWarpLanes = 32;
constexpr uint32_t kWholeWarp = ~0u;

// A value of the cache: rounded once on its way in, exact on its way out. Pair: two neighbours; Scales: what widens one.
template <class Value>
struct KvValues;

struct NoScales {};

template <>
struct KvValues<__half> {
    using Pair = __half2;
    using Scales = NoScales;
    static constexpr KvType kType = KvType::f16;
    static __device__ __forceinline__ __half narrow(float x) { return __float2half_rn(x); }
    static __device__ __forceinline__ float2 widen(const Pair& pair, const Scales&) {
        return {__low2float(pair), __high2float(pair)};
    }
};

template <>
struct KvValues<float> {
    using Pair = float2;
    using Scales = NoScales;
    static constexpr KvType kType = KvType::f32;
    static __device__ __forceinline__ float narrow(float x) { return x; }
    static __device__ __forceinline__ float2 widen(const Pair& pair, const Scales&) { return pair; }
};

template <>
struct KvValues<int8_t> {
    using Pair = uint16_t;
    // (kBias + q + 128) * scale + shift is q * scale: every step is exact.
    struct Scales {
        float2 scale;
        float2 shift;
    };
    static constexpr KvType kType = KvType::int8;
    static constexpr float kBias = 32768.0f;

    static __device__ __forceinline__ Scales scales(const __half2& halves) {
        const float2 scale = {__low2float(halves), __high2float(halves)};
        return {scale, {quant::mul(scale.x, -(kBias + 128)), quant::mul(scale.y, -(kBias + 128))}};
    }
    static __device__ __forceinline__ float2 widen(Pair pair, const Scales& s) {
        constexpr uint32_t kBiasBits = 0x47000000;  // q + 128 goes into bits 8 to 15
        const uint32_t biased = pair ^ 0x8080u;
        return {quant::fma(quant::bits_float(device::permute(biased, kBiasBits, 0x7404)), s.scale.x, s.shift.x),
                quant::fma(quant::bits_float(device::permute(biased, kBiasBits, 0x7414)), s.scale.y, s.shift.y)};
    }
};

// One value, as the first of a pair.
__device__ __forceinline__ float widen_one(__half x, const NoScales& s) {
    return KvValues<__half>::widen(__half2(x, x), s).x;
}
__device__ __forceinline__ float widen_one(float x, const NoScales&) {
    return x;
}
__device__ __forceinline__ float widen_one(int8_t x, const KvValues<int8_t>::Scales& s) {
    return KvValues<int8_t>::widen(static_cast<uint8_t>(x), s).x;
}

template <class Value>
constexpr bool kHasScales = kv_scale_bytes(KvValues<Value>::kType) > 0;

// Of one position: its values, then its scales, counted in values.
template <class Value>
__host__ __device__ constexpr int row_values(int head_dim) {
    return head_dim + kv_groups(head_dim) * (kv_scale_bytes(KvValues<Value>::kType) / static_cast<int>(sizeof(Value)));
}
// From one tile to the next.
template <class Value>
__host__ __device__ constexpr int tile_values(int head_dim) {
    return kKvTile * row_values<Value>(head_dim);
}

// The scales behind `num` values of a tile or of a row that has them.
template <class Value>
__device__ __forceinline__ __half* scales_behind(Value* values, int num) {
    return reinterpret_cast<__half*>(values + num);
}
template <class Value>
__device__ __forceinline__ const __half* scales_behind(const Value* values, int num) {
    return reinterpret_cast<const __half*>(values + num);
}

// Of a lane's positions 2 lane and 2 lane + 1, for the dimensions of group `group`.
__device__ __forceinline__ KvValues<int8_t>::Scales key_scales(const int8_t* tile, int head_dim, int group, int lane) {
    const __half* scales = scales_behind(tile, kKvTile * head_dim) + group * kKvTile;
    return KvValues<int8_t>::scales(reinterpret_cast<const __half2*>(scales)[lane]);
}

// Of kNum neighbouring positions, for the dimensions of one group; kNum a multiple of 8.
template <class Value, int kNum>
struct ValueScales {
    __device__ ValueScales(const Value*, int, int, int) {}
    __device__ typename KvValues<Value>::Scales of(int) const { return {}; }
};
template <int kNum>
struct ValueScales<int8_t, kNum> {
    static constexpr int kUnitScales = 8;
    uint4 units[kNum / kUnitScales];

    __device__ ValueScales(const int8_t* tile, int head_dim, int group, int begin) {
        const __half* scales = scales_behind(tile, kKvTile * head_dim) + group * kKvTile + begin;
#pragma unroll
        for (int i = 0; i < kNum / kUnitScales; i++) units[i] = reinterpret_cast<const uint4*>(scales)[i];
    }
    __device__ KvValues<int8_t>::Scales of(int i) const {
        const uint4& unit = units[i / kUnitScales];
        const uint32_t words[4] = {unit.x, unit.y, unit.z, unit.w}, word = words[i % kUnitScales / 2];
        const __half half = __ushort_as_half(static_cast<uint16_t>(i % 2 == 0 ? word : word >> 16));
        return KvValues<int8_t>::scales(__half2(half, half));
    }
};

// One warp rounds a row of `head_dim` values, a multiple of 32: `value(i)` gives them, `put(i, rounded)` and `put_scale(group,
// half)` take them.
template <class Value, class Get, class Put, class PutScale>
__device__ __forceinline__ void narrow_row(int head_dim, int lane, const Get& value, const Put& put, const PutScale& put_scale) {
    if constexpr (kHasScales<Value>) {
        for (int begin = 0; begin < head_dim; begin += kKvGroup) {
            const int i = begin + lane, j = i + kWarpLanes;
            const bool is_short = begin + kWarpLanes == head_dim;
            const float low = value(i), high = is_short ? 0.0f : value(j);
            const uint32_t amax = max(quant::float_bits(low) & 0x7fffffffu, quant::float_bits(high) & 0x7fffffffu);
            const KvScale scale = kv_scale(__reduce_max_sync(kWholeWarp, amax));
            put(i, kv_rounded(low, scale));
            if (!is_short) put(j, kv_rounded(high, scale));
            if (lane == 0) put_scale(begin / kKvGroup, __ushort_as_half(scale.half));
        }
    } else {
        for (int i = lane; i < head_dim; i += kWarpLanes) put(i, KvValues<Value>::narrow(value(i)));
    }
}

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
