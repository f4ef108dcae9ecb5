// RMS norm and quantisation of a row by one block, into its shared memory: the bits of ops/norm.h.
//
// In a window of one row every block that needs the normed row makes it again, from 4 * width bytes in the L2 cache; several rows
// are made once, by norm_window.h.
#pragma once
#include <cuda_runtime.h>

#include "cuda_ops/miss_post.h"
#include "device/primitives.cuh"
#include "quant/quantise_device.cuh"

namespace tandem::cuda {

struct NormRow {
    const float* x;      // [width], global, written by an earlier kernel
    const float* gamma;  // [width], global
    int width;           // a multiple of 4; of 32 where groups are wanted
    float eps;
    float* scratch;              // shared, [width]
    float* inverse;              // shared
    quant::SharedGroup* groups;  // shared, [ceil(width / 256)], or null; the last one is padded with zero blocks
    float* values;               // shared, [width], may be `scratch`; or null
};

// What a thread of a block will need of gamma for the groups, on its way while the block waits for the row.
struct GammaAhead {
    float4 part[2];
};

namespace detail {

__device__ __forceinline__ void load_gamma(const float* gamma, int at, int width, float4 (&out)[2]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        out[i] = {};
        if (at + 4 * i < width) out[i] = __ldg(reinterpret_cast<const float4*>(gamma + at + 4 * i));
    }
}

// 1 / sqrt(mean of squares + eps): lane j has chain j of 32, then the tree 16, 8, 4, 2, 1.
__device__ __forceinline__ float inverse_rms(const float* x, int width, float eps, int lane) {
    float sum = 0.0f;
#pragma unroll 8
    for (int i = lane; i < width; i += 32) sum = quant::add(sum, quant::mul(x[i], x[i]));
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum = quant::add(sum, __shfl_xor_sync(~0u, sum, step));
    return __fdiv_rn(1.0f, __fsqrt_rn(quant::add(quant::div(sum, static_cast<float>(width)), eps)));
}

// Eight neighbouring products x * gamma; zeros beyond the row's end.
__device__ __forceinline__ void multiply_eight(const float* x, const float4 (&gamma)[2], int at, int width, float (&y)[8]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float4 v{};
        if (at + 4 * i < width) v = *reinterpret_cast<const float4*>(x + at + 4 * i);
        y[4 * i] = quant::mul(v.x, gamma[i].x);
        y[4 * i + 1] = quant::mul(v.y, gamma[i].y);
        y[4 * i + 2] = quant::mul(v.z, gamma[i].z);
        y[4 * i + 3] = quant::mul(v.w, gamma[i].w);
    }
}

}  // namespace detail

// May be called before wait_prerequisites(): gamma is a weight. Where no groups are wanted it brings gamma nearer.
__device__ __forceinline__ GammaAhead fetch_gamma(const float* gamma, int width, int thread) {
    GammaAhead ahead{};
    const int warp = thread / 32, at = (warp - 1) * quant::kSuper + 8 * (thread % 32);
    if (warp > 0) detail::load_gamma(gamma, at, width, ahead.part);
    return ahead;
}

// All threads of the block call after wait_prerequisites(); has barriers inside and one at its end. In little code: a launch
// fetches its instructions anew, and that takes longer than running them. Warp 0 has the chains of the sum, the last one calls
// beside(lane) meanwhile, the others have the groups. All threads call behind() once the row in `scratch` is not needed any more,
// if no values are wanted; what was made beside is there.
template <class Beside, class Behind>
__device__ __forceinline__ void norm_row(const NormRow& p, const GammaAhead& ahead, int thread, int num_threads,
                                         const Beside& beside, const Behind& behind) {
    const int warp = thread / 32, lane = thread % 32, others = num_threads / 32 - 2;
    const auto* from = reinterpret_cast<const float4*>(p.x);
    auto* to = reinterpret_cast<float4*>(p.scratch);
#pragma unroll 2
    for (int i = thread; i < p.width / 4; i += num_threads) to[i] = __ldcg(from + i);
    __syncthreads();
    const int groups = (p.width + quant::kSuper - 1) / quant::kSuper;
    if (warp == 0) {
        const float inverse = detail::inverse_rms(p.scratch, p.width, p.eps, lane);
        if (lane == 0) *p.inverse = inverse;
    } else if (warp > others) {
        beside(lane);
    } else if (p.groups) {
#pragma unroll 1
        for (int group = warp - 1; group < groups; group += others) {
            const int at = group * quant::kSuper + 8 * lane;
            float4 gamma[2] = {ahead.part[0], ahead.part[1]};
            float y[8];
            if (group >= others) detail::load_gamma(p.gamma, at, p.width, gamma);
            detail::multiply_eight(p.scratch, gamma, at, p.width, y);
            quant::quantise_super(y, 1.0f, p.groups[group], lane);
        }
    }
    device::fence_stores();
    __syncthreads();
    const float inverse = *p.inverse;
    if (p.groups)
#pragma unroll 1
        for (int i = thread; i < groups * quant::kBlocks; i += num_threads) {
            float& d = p.groups[i / quant::kBlocks].d[i % quant::kBlocks];
            if (d != 0.0f) d = quant::mul(d, inverse);  // a zero block stays one, whatever the factor is
        }
    behind();
    if (p.values)
#pragma unroll 2
        for (int i = thread; i < p.width; i += num_threads)
            p.values[i] = quant::mul(quant::mul(p.scratch[i], __ldg(p.gamma + i)), inverse);
    __syncthreads();
}

// Lets down_window weigh its rows before gate_up_window has ended. One thread calls it.
__device__ __forceinline__ void tell_inverse(MissState* state, int layer, int row, float inverse) {
    device::store_word_device(state->normed + row, static_cast<uint64_t>(layer + 1) << 32 | quant::float_bits(inverse));
}

}  // namespace tandem::cuda
