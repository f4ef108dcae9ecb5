#include "cuda_ops/norm_rows.cuh"

namespace tandem::cuda {

namespace {

__device__ __forceinline__ void load_rows(const NormRows& p, int thread, int num_threads) {
    const auto* from = reinterpret_cast<const float4*>(p.x);
    auto* to = reinterpret_cast<float4*>(p.scratch);
#pragma unroll 4
    for (int i = thread; i < p.num_rows * p.width / 4; i += num_threads) to[i] = __ldcg(from + i);
}

// The groups of all rows without the factor of the norm, by warps `warp`, `warp` + `num_warps`, ...
__device__ __forceinline__ void quantise_products(const NormRows& p, int warp, int num_warps, int lane) {
    const int groups = (p.width + quant::kSuper - 1) / quant::kSuper;
    for (int item = warp; item < p.num_rows * groups; item += num_warps) {
        const int row = item / groups, group = item % groups, at = group * quant::kSuper + 8 * lane;
        float4 gamma[2];
        float y[8];
        detail::load_gamma(p.gamma, at, p.width, gamma);
        detail::multiply_eight(p.scratch + row * p.width, gamma, at, p.width, y);
        quant::quantise_super(y, 1.0f, p.groups[row * groups + group], lane);
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

}  // namespace

__device__ void norm_rows(const NormRows& p, int thread, int num_threads) {
    const int warp = thread / 32, num_warps = num_threads / 32, lane = thread % 32;
    load_rows(p, thread, num_threads);
    __syncthreads();
    // The sums are chains: their warps leave the quantising to the others, if there are any.
    for (int row = warp; row < p.num_rows; row += num_warps) {
        const float inverse = detail::inverse_rms(p.scratch + row * p.width, p.width, p.eps, lane);
        if (lane == 0) p.inverse[row] = inverse;
    }
    if (p.groups) {
        const int busy = p.num_rows < num_warps ? p.num_rows : 0;
        if (warp >= busy) quantise_products(p, warp - busy, num_warps - busy, lane);
    }
    __syncthreads();
    if (p.groups) scale_groups(p, thread, num_threads);
    if (p.values) scale_values(p, thread, num_threads);
    __syncthreads();
}

}  // namespace tandem::cuda
