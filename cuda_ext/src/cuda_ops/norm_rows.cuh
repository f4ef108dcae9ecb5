// RMS norm and quantisation of a window's rows by one block, into its shared memory: the bits of ops/norm.h.
//
// Blocks do not share the result: every block that needs a normed row computes it again from 4 * width bytes in the L2 cache.
#pragma once
#include <cuda_runtime.h>

#include "quant/quantise_device.cuh"

namespace tandem::cuda {

struct NormRows {
    const float* x;      // [num_rows, width], global, written by an earlier kernel
    const float* gamma;  // [width], global
    int width;           // a multiple of 4; of 32 where groups are wanted
    float eps;
    int num_rows;             // 1..8
    float* scratch;           // shared, [num_rows, width]
    float* inverse;           // shared, [num_rows]
    quant::ActGroup* groups;  // shared, [num_rows, ceil(width / 256)], or null; last groups are padded with zero blocks
    float* values;            // shared, [num_rows, width], may be `scratch`; or null
};

namespace detail {

// 1 / sqrt(mean of squares + eps): lane j has chain j of 32, then the tree 16, 8, 4, 2, 1.
__device__ __forceinline__ float inverse_rms(const float* x, int width, float eps, int lane) {
    float sum = 0.0f;
#pragma unroll 16
    for (int i = lane; i < width; i += 32) sum = quant::add(sum, quant::mul(x[i], x[i]));
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum = quant::add(sum, __shfl_xor_sync(~0u, sum, step));
    return __fdiv_rn(1.0f, __fsqrt_rn(quant::add(quant::div(sum, static_cast<float>(width)), eps)));
}

__device__ __forceinline__ void load_rows(const NormRows& p, int thread, int num_threads) {
    const auto* from = reinterpret_cast<const float4*>(p.x);
    auto* to = reinterpret_cast<float4*>(p.scratch);
#pragma unroll 4
    for (int i = thread; i < p.num_rows * p.width / 4; i += num_threads) to[i] = __ldcg(from + i);
}

// The groups of all rows without the factor of the norm, by warps `warp`, `warp` + `num_warps`, ...
__device__ __forceinline__ void quantise_products(const NormRows& p, int warp, int num_warps, int lane) {
    const int groups = (p.width + quant::kSuper - 1) / quant::kSuper, chunks = groups * quant::kSuper / quant::kWarpValues;
    for (int item = warp; item < p.num_rows * chunks; item += num_warps) {
        const int row = item / chunks, first = item % chunks * quant::kWarpValues, at = first + 4 * lane;
        float y[4] = {};
        if (at < p.width) {
            const float4 x = *reinterpret_cast<const float4*>(p.scratch + row * p.width + at);
            const float4 gamma = __ldg(reinterpret_cast<const float4*>(p.gamma + at));
            y[0] = quant::mul(x.x, gamma.x);
            y[1] = quant::mul(x.y, gamma.y);
            y[2] = quant::mul(x.z, gamma.z);
            y[3] = quant::mul(x.w, gamma.w);
        }
        quant::quantise_values(y, 1.0f, p.groups + row * groups, first, lane);
    }
}

__device__ __forceinline__ void scale_groups(const NormRows& p, int thread, int num_threads) {
    const int groups = (p.width + quant::kSuper - 1) / quant::kSuper, blocks = groups * quant::kBlocks;
    for (int i = thread; i < p.num_rows * blocks; i += num_threads) {
        float& d = p.groups[i / quant::kBlocks].d[i % quant::kBlocks];
        if (d != 0.0f) d = quant::mul(d, p.inverse[i / blocks]);  // a zero block stays one, whatever the factor is
    }
}

__device__ __forceinline__ void scale_values(const NormRows& p, int thread, int num_threads) {
    for (int i = thread; i < p.num_rows * p.width; i += num_threads)
        p.values[i] = quant::mul(quant::mul(p.scratch[i], __ldg(p.gamma + i % p.width)), p.inverse[i / p.width]);
}

// One row, by the shortest code: a launch fetches its instructions anew, and that takes longer than running them.
__device__ __forceinline__ void norm_one_row(const NormRows& p, int thread, int num_threads) {
    const int warp = thread / 32, lane = thread % 32, others = num_threads / 32 - 1;
    const auto* from = reinterpret_cast<const float4*>(p.x);
    auto* to = reinterpret_cast<float4*>(p.scratch);
#pragma unroll 2
    for (int i = thread; i < p.width / 4; i += num_threads) to[i] = __ldcg(from + i);
    __syncthreads();
    const int groups = (p.width + quant::kSuper - 1) / quant::kSuper;
    if (warp == 0) {
        const float inverse = inverse_rms(p.scratch, p.width, p.eps, lane);
        if (lane == 0) p.inverse[0] = inverse;
    } else if (p.groups) {
#pragma unroll 1
        for (int first = (warp - 1) * quant::kWarpValues; first < groups * quant::kSuper; first += others * quant::kWarpValues) {
            const int at = first + 4 * lane;
            float4 x{}, gamma{};
            if (at < p.width) {
                x = *reinterpret_cast<const float4*>(p.scratch + at);
                gamma = __ldg(reinterpret_cast<const float4*>(p.gamma + at));
            }
            const float y[4] = {quant::mul(x.x, gamma.x), quant::mul(x.y, gamma.y), quant::mul(x.z, gamma.z), quant::mul(x.w, gamma.w)};
            quant::quantise_values(y, 1.0f, p.groups, first, lane);
        }
    }
    __syncthreads();
    const float inverse = p.inverse[0];
    if (p.groups)
#pragma unroll 1
        for (int i = thread; i < groups * quant::kBlocks; i += num_threads) {
            float& d = p.groups[i / quant::kBlocks].d[i % quant::kBlocks];
            if (d != 0.0f) d = quant::mul(d, inverse);
        }
    if (p.values)
#pragma unroll 2
        for (int i = thread; i < p.width; i += num_threads)
            p.values[i] = quant::mul(quant::mul(p.scratch[i], __ldg(p.gamma + i)), inverse);
    __syncthreads();
}

}  // namespace detail

// All threads of the block call; has barriers inside and one at its end. Call after wait_prerequisites().
__device__ __forceinline__ void norm_rows(const NormRows& p, int thread, int num_threads) {
    if (p.num_rows == 1) return detail::norm_one_row(p, thread, num_threads);
    const int warp = thread / 32, num_warps = num_threads / 32, lane = thread % 32;
    detail::load_rows(p, thread, num_threads);
    __syncthreads();
    // The sums are chains: their warps leave the quantising to the others, if there are any.
    for (int row = warp; row < p.num_rows; row += num_warps) {
        const float inverse = detail::inverse_rms(p.scratch + row * p.width, p.width, p.eps, lane);
        if (lane == 0) p.inverse[row] = inverse;
    }
    if (p.groups) {
        const int busy = p.num_rows < num_warps ? p.num_rows : 0;
        if (warp >= busy) detail::quantise_products(p, warp - busy, num_warps - busy, lane);
    }
    __syncthreads();
    if (p.groups) detail::scale_groups(p, thread, num_threads);
    if (p.values) detail::scale_values(p, thread, num_threads);
    __syncthreads();
}

}  // namespace tandem::cuda
