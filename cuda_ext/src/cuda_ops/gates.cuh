// From a router's sums to the weights of a routed list, in windows and prompts: the bits of ops/route.h.
#pragma once
#include <cuda_runtime.h>

#include "device/primitives.cuh"
#include "ops/gating.h"
#include "ops/router_sum.h"
#include "quant/arithmetic.h"

namespace tandem::cuda {

// Rises with the score of a sum.
__device__ __forceinline__ uint32_t score_key(int64_t sum) {
    const uint32_t bits = quant::float_bits(router_score(sum));
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

__device__ __forceinline__ int64_t load_sum(const int64_t* sum) {
    return __ldcg(reinterpret_cast<const long long*>(sum));
}

__device__ __forceinline__ float logit_of(const int64_t* sums, int expert, float inverse) {
    return quant::mul(router_score(load_sum(sums + expert)), inverse);
}

// sum8 of ops/vector.h over exp(logit - most) of all experts: lane j % 8 has chain j.
__device__ __forceinline__ float sum_of_gates(const int64_t* sums, int num_experts, float inverse, float most, int lane) {
    float sum = 0.0f;
#pragma unroll 4
    for (int i = lane % 8; i < num_experts; i += 8)
        sum = quant::add(sum, quant::exp_clamped(quant::add(logit_of(sums, i, inverse), -most)));
#pragma unroll
    for (int step = 4; step > 0; step /= 2) sum = quant::add(sum, __shfl_xor_sync(~0u, sum, step));
    return sum;
}

// Weights of one row's list by one warp; the warp's lanes have the ids. `inverse`: the row's 1 / rms.
__device__ __forceinline__ float list_weight(const int64_t* sums, int num_experts, int top_k, Gating gating, bool renormalise,
                                             float inverse, int id, int lane) {
    const bool listed = lane < top_k;
    const float logit = listed ? logit_of(sums, id, inverse) : 0.0f, most = __shfl_sync(~0u, logit, 0);
    float weight = 0.0f, sum = 1.0f;
    if (listed)
        weight = gating == Gating::softmax ? quant::exp_clamped(quant::add(logit, -most))
                                           : quant::div(1.0f, quant::add(1.0f, quant::exp_clamped(-logit)));
    if (renormalise) {
        sum = 0.0f;
#pragma unroll 1
        for (int place = 0; place < top_k; place++) sum = quant::add(sum, __shfl_sync(~0u, weight, place));
    } else if (gating == Gating::softmax) {
        sum = sum_of_gates(sums, num_experts, inverse, most, lane);
    }
    return quant::div(weight, sum);
}

}  // namespace tandem::cuda
