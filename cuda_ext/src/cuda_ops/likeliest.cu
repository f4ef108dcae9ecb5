#include "cuda_ops/likeliest.h"

#include "cuda_ops/likeliest.cuh"
#include "device/launch.h"
#include "device/primitives.cuh"

namespace tandem::cuda {

namespace {

__global__ void __launch_bounds__(kLikeliestThreads) likeliest_kernel(LikeliestProblem problem) {
    const int row = blockIdx.y;
    device::wait_prerequisites();
    device::launch_dependents();
    const float* logits = problem.logits + static_cast<int64_t>(row) * problem.vocab;
    Likeliest best = no_likeliest();
    for (int token = blockIdx.x * kLikeliestThreads + threadIdx.x; token < problem.vocab;
         token += kLikeliestParts * kLikeliestThreads)
        take_greater(best, likeliest_of(token, __ldcg(logits + token)));
    if (likeliest_of_row(best, problem.parts[row])) problem.out[row] = best;
}

}  // namespace

void likeliest_window(const LikeliestProblem& problem, int num_rows, bool dependent, cudaStream_t stream) {
    device::launch({dim3(kLikeliestParts, num_rows), dim3(kLikeliestThreads), 0, stream, dependent}, likeliest_kernel, problem);
}

}  // namespace tandem::cuda
