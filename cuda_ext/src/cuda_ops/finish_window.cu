#include "cuda_ops/finish_window.h"

#include <algorithm>

#include "device/launch.h"
#include "device/primitives.cuh"

namespace tandem::cuda {

namespace {

constexpr int kThreads = 1024;

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

void finish_window(const FinishProblem& problem, bool dependent, cudaStream_t stream) {
    constexpr int kMostBlocks = 16;
    const int blocks = std::clamp((problem.num_uses + kThreads - 1) / kThreads, 1, kMostBlocks);
    device::launch({dim3(blocks), dim3(kThreads), 0, stream, dependent}, finish_kernel, problem);
}

}  // namespace tandem::cuda
