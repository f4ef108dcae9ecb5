#include "cuda_ops/finish_window.h"

#include <algorithm>

#include "device/launch.h"
#include "device/primitives.cuh"

namespace tandem::cuda {

namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;

// Of two the greater logit, of equal ones the lower token; a NaN wins over everything and stays.
__device__ void take_greater(Likeliest& best, const Likeliest& other) {
    best.lowest = fminf(best.lowest, other.lowest);
    if (best.token < 0) return;
    const bool wins = other.token < 0 || other.peak > best.peak || (other.peak == best.peak && other.token < best.token);
    if (!wins) return;
    best.token = other.token;
    best.peak = other.peak;
}

__device__ Likeliest from_lane(const Likeliest& mine, int distance) {
    return {__shfl_xor_sync(~0u, mine.token, distance), __shfl_xor_sync(~0u, mine.peak, distance),
            __shfl_xor_sync(~0u, mine.lowest, distance)};
}

__device__ void reduce_warp(Likeliest& best) {
    for (int distance = 16; distance > 0; distance /= 2) take_greater(best, from_lane(best, distance));
}

__device__ Likeliest read_part(const Likeliest& part) {
    return {__ldcg(&part.token), __ldcg(&part.peak), __ldcg(&part.lowest)};
}

// A row of logits by kLikeliestParts blocks; the last one that is through compares what the others found.
__global__ void __launch_bounds__(kThreads) likeliest_kernel(LikeliestProblem problem) {
    __shared__ Likeliest of_warps[kWarps];
    const int thread = threadIdx.x, part = blockIdx.x, row = blockIdx.y;
    device::wait_prerequisites();
    device::launch_dependents();
    const float* logits = problem.logits + static_cast<int64_t>(row) * problem.vocab;
    Likeliest best{0x7fffffff, -INFINITY, INFINITY};
    for (int token = part * kThreads + thread; token < problem.vocab; token += kLikeliestParts * kThreads) {
        const float logit = __ldcg(logits + token);
        take_greater(best, isnan(logit) ? Likeliest{-1, logit, logit} : Likeliest{token, logit, logit});
    }
    reduce_warp(best);
    if (thread % 32 == 0) of_warps[thread / 32] = best;
    __syncthreads();
    if (thread >= 32) return;
    best = of_warps[thread];
    reduce_warp(best);
    LikeliestParts& parts = problem.parts[row];
    bool is_last = false;
    if (thread == 0) {
        parts.parts[part] = best;
        __threadfence();
        is_last = atomicAdd(&parts.num_done, 1u) == kLikeliestParts - 1;
    }
    if (!__shfl_sync(~0u, is_last, 0)) return;
    __threadfence();
    best = read_part(parts.parts[thread]);
    reduce_warp(best);
    if (thread != 0) return;
    parts.num_done = 0;
    problem.out[row] = best;
}
static_assert(kLikeliestParts == 32, "a lane compares a part");

__global__ void __launch_bounds__(kThreads) finish_kernel(FinishProblem problem) {
    __shared__ bool is_last;
    device::wait_prerequisites();
    for (int i = blockIdx.x * kThreads + threadIdx.x; i < problem.num_uses; i += gridDim.x * kThreads) {
        problem.landed[i] = problem.uses[i];
        problem.uses[i] = 0;
    }
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(problem.counter, 1u) == gridDim.x - 1;
    __syncthreads();
    if (!is_last || threadIdx.x != 0) return;
    *problem.counter = 0;
    problem.end->voided = problem.misses->voided;
    problem.misses->voided = problem.misses->asked_layers = 0;
    for (uint64_t& row : problem.misses->normed) row = 0;
    __threadfence_system();
    device::store_release_system(&problem.words->ended, 1);
}

}  // namespace

void likeliest_window(const LikeliestProblem& problem, int num_rows, bool dependent, cudaStream_t stream) {
    device::launch({dim3(kLikeliestParts, num_rows), dim3(kThreads), 0, stream, dependent}, likeliest_kernel, problem);
}

void finish_window(const FinishProblem& problem, bool dependent, cudaStream_t stream) {
    constexpr int kMostBlocks = 16;
    const int blocks = std::clamp((problem.num_uses + kThreads - 1) / kThreads, 1, kMostBlocks);
    device::launch({dim3(blocks), dim3(kThreads), 0, stream, dependent}, finish_kernel, problem);
}

}  // namespace tandem::cuda
