#include "cuda_ops/norm_rows.cuh"

namespace tandem::cuda {

namespace {

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

// The groups of all rows without the factor of the norm, by warps `warp`, `warp` + `num_warps`, ...
__device__ __forceinline__ void quantise_products(const NormRows& p, int warp, int num_warps, int lane) {
    const int groups = (p.width + quant::kSuper - 1) / quant::kSuper;
    for (int item = warp; item < p.num_rows * groups; item += num_warps) {
        const int row = item / groups, group = item % groups, at = group * quant::kSuper + 8 * lane;
        float4 gamma[2];
        float y[8];
        detail::load_gamma(p.gamma, at, p.width, gamma);
        multiply_eight(p.scratch + row * p.width, gamma, at, p.width, y);
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

// One row, by the shortest code: a launch fetches its instructions anew, and that takes longer than running them. Warp 0 has the
// chains of the sum, the others the groups.
__device__ __forceinline__ void norm_one_row(const NormRows& p, const GammaAhead& ahead, int thread, int num_threads) {
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
        int round = 0;
#pragma unroll 1
        for (int group = warp - 1; group < groups; group += others, round++) {
            const int at = group * quant::kSuper + 8 * lane;
            float4 gamma[2] = {round == 0 ? ahead.part[0] : ahead.part[2], round == 0 ? ahead.part[1] : ahead.part[3]};
            float y[8];
            if (round >= GammaAhead::kRounds) detail::load_gamma(p.gamma, at, p.width, gamma);
            multiply_eight(p.scratch, gamma, at, p.width, y);
            quant::quantise_super(y, 1.0f, p.groups[group], lane);
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

}  // namespace

__device__ void norm_rows(const NormRows& p, const GammaAhead& ahead, int thread, int num_threads) {
    if (p.num_rows == 1) return norm_one_row(p, ahead, thread, num_threads);
    const int warp = thread / 32, num_warps = num_threads / 32, lane = thread % 32;
    load_rows(p, thread, num_threads);
    __syncthreads();
    // The sums are chains: their warps leave the quantising to the others, if there are any.
    for (int row = warp; row < p.num_rows; row += num_warps) {
        const float inverse = inverse_rms(p.scratch + row * p.width, p.width, p.eps, lane);
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
