// The greatest of a row of logits, found by kLikeliestParts blocks together.
#pragma once
#include "cuda_ops/likeliest.h"
#include "device/primitives.cuh"

namespace tandem::cuda {

constexpr int kLikeliestThreads = 1024;

__device__ inline Likeliest likeliest_of(int32_t token, float logit) {
    return isnan(logit) ? Likeliest{-1, logit, logit} : Likeliest{token, logit, logit};
}

__device__ inline Likeliest no_likeliest() {
    return {0x7fffffff, -INFINITY, INFINITY};
}

// Of two the greater logit, of equal ones the lower token; a NaN wins over everything and stays.
__device__ inline void take_greater(Likeliest& best, const Likeliest& other) {
    best.lowest = fminf(best.lowest, other.lowest);
    if (best.token < 0) return;
    const bool wins = other.token < 0 || other.peak > best.peak || (other.peak == best.peak && other.token < best.token);
    if (!wins) return;
    best.token = other.token;
    best.peak = other.peak;
}

__device__ inline void reduce_warp(Likeliest& best) {
    for (int distance = 16; distance > 0; distance /= 2)
        take_greater(best, {__shfl_xor_sync(~0u, best.token, distance), __shfl_xor_sync(~0u, best.peak, distance),
                            __shfl_xor_sync(~0u, best.lowest, distance)});
}

__device__ inline Likeliest read_likeliest(const Likeliest* part) {
    return {__ldcg(&part->token), __ldcg(&part->peak), __ldcg(&part->lowest)};
}

// Each thread's best becomes that of the row, `parts.whole`. True for one thread of the block that is through last, which has it in
// `best`.
__device__ inline bool likeliest_of_row(Likeliest& best, LikeliestParts& parts) {
    __shared__ Likeliest of_warps[kLikeliestThreads / 32];
    const int thread = threadIdx.x;
    reduce_warp(best);
    if (thread % 32 == 0) of_warps[thread / 32] = best;
    __syncthreads();
    if (thread >= 32) return false;
    best = of_warps[thread];
    reduce_warp(best);
    bool is_last = false;
    if (thread == 0) {
        parts.parts[blockIdx.x] = best;
        __threadfence();
        is_last = atomicAdd(&parts.num_done, 1u) == kLikeliestParts - 1;
    }
    if (!__shfl_sync(~0u, is_last, 0)) return false;
    __threadfence();
    best = read_likeliest(&parts.parts[thread]);
    reduce_warp(best);
    if (thread != 0) return false;
    parts.num_done = 0;
    parts.whole = best;
    return true;
}
static_assert(kLikeliestParts == 32 && kLikeliestThreads == 1024, "a lane compares a warp, or a part");

}  // namespace tandem::cuda
