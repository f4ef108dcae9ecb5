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

// What a thread of a block will need of gamma for the groups of one row, on its way while the block waits for the row.
struct GammaAhead {
    static constexpr int kRounds = 2;
    float4 part[2 * kRounds];
};

namespace detail {

__device__ __forceinline__ void load_gamma(const float* gamma, int at, int width, float4 (&out)[2]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        out[i] = {};
        if (at + 4 * i < width) out[i] = __ldg(reinterpret_cast<const float4*>(gamma + at + 4 * i));
    }
}

}  // namespace detail

// May be called before wait_prerequisites(): gamma is a weight. Where no groups are wanted it brings gamma nearer.
__device__ __forceinline__ GammaAhead fetch_gamma(const float* gamma, int width, int thread, int num_threads) {
    GammaAhead ahead{};
    const int warp = thread / 32, others = num_threads / 32 - 1;
#pragma unroll
    for (int round = 0; round < GammaAhead::kRounds; round++) {
        const int at = (warp - 1 + round * others) * quant::kSuper + 8 * (thread % 32);
        float4 part[2] = {};
        if (warp > 0) detail::load_gamma(gamma, at, width, part);
        ahead.part[2 * round] = part[0];
        ahead.part[2 * round + 1] = part[1];
    }
    return ahead;
}

// All threads of the block call; has barriers inside and one at its end. Call after wait_prerequisites().
// Not inlined: the kernels of a layer share its instructions, which their launches would fetch once each.
__device__ void norm_rows(const NormRows& p, const GammaAhead& ahead, int thread, int num_threads);

}  // namespace tandem::cuda
