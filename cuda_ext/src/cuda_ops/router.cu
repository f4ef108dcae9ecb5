#include "cuda_ops/router.h"

#include <algorithm>

#include "cuda_ops/router_sum.cuh"
#include "device/check.h"
#include "device/launch.h"
#include "device/primitives.cuh"

namespace tandem::cuda {

namespace {

constexpr int kThreads = 128;       // a thread has an expert
constexpr int kRows = 8;            // of a block
constexpr int kSlab = kThreads;     // values of x that lie in shared memory
constexpr int64_t kBlocks = 1024;   // that keep a large card busy
constexpr int64_t kPartGroups = 4;  // of a block, at least

// A block has kThreads experts, kRows rows and an even share of the groups.
__global__ void __launch_bounds__(kThreads) router_kernel(const RouterRowsProblem p, int num_rows) {
    __shared__ float y[kSlab][kRows];
    device::wait_prerequisites();
    device::launch_dependents();
    const int expert = blockIdx.x * kThreads + threadIdx.x, first_row = blockIdx.y * kRows;
    const int64_t groups = router_groups(p.width), parts = gridDim.z;
    const int begin = static_cast<int>(groups * blockIdx.z / parts) * kRouterGroup,
              end = min(static_cast<int>(groups * (blockIdx.z + 1) / parts) * kRouterGroup, p.width);
    int64_t sums[kRows] = {};
    for (int slab = begin; slab < end; slab += kSlab) {
        const int num = min(kSlab, end - slab);
        if (const int at = slab + threadIdx.x; at < end) {
            const float gamma = __ldg(p.gamma + at);
#pragma unroll
            for (int r = 0; r < kRows; r++) {
                const float* x = p.x + static_cast<int64_t>(first_row + r) * p.width;
                y[threadIdx.x][r] = first_row + r < num_rows ? quant::mul(__ldcg(x + at), gamma) : 0.0f;
            }
        }
        __syncthreads();
        for (int group = 0; expert < p.num_experts && group < num; group += kRouterGroup) {
            const float* weights = p.weights + static_cast<int64_t>(slab + group) * p.num_experts + expert;
            float dots[kRows] = {};
            float column[kRouterGroup];
#pragma unroll
            for (int i = 0; i < kRouterGroup; i++)
                column[i] = group + i < num ? __ldg(weights + static_cast<int64_t>(i) * p.num_experts) : 0.0f;
#pragma unroll
            for (int i = 0; i < kRouterGroup; i++) {
                if (group + i >= num) break;
#pragma unroll
                for (int r = 0; r < kRows; r++) dots[r] = quant::fma(column[i], y[group + i][r], dots[r]);
            }
#pragma unroll
            for (int r = 0; r < kRows; r++) sums[r] += router_whole(dots[r]);
        }
        __syncthreads();
    }
    if (expert >= p.num_experts) return;
#pragma unroll
    for (int r = 0; r < kRows; r++) {
        if (first_row + r >= num_rows) break;
        add_router_sum(p.sums + static_cast<int64_t>(first_row + r) * p.num_experts + expert, sums[r]);
    }
}

void launch(const RouterRowsProblem& p, int num_rows, bool dependent, cudaStream_t stream) {
    const int64_t columns = (p.num_experts + kThreads - 1) / kThreads, rows = (num_rows + kRows - 1) / kRows;
    const int64_t most = (router_groups(p.width) + kPartGroups - 1) / kPartGroups;
    const auto parts = static_cast<unsigned>(std::clamp<int64_t>(kBlocks / (columns * rows), 1, most));
    device::launch({dim3(static_cast<unsigned>(columns), static_cast<unsigned>(rows), parts), dim3(kThreads), 0, stream, dependent},
                   router_kernel, p, num_rows);
}

}  // namespace

void router_window(const RouterRowsProblem& problem, int num_rows, cudaStream_t stream) {
    launch(problem, num_rows, true, stream);
}

void router_prompt(const RouterRowsProblem& problem, int num_rows, cudaStream_t stream) {
    if (num_rows == 0) return;
    CUDA_CHECK(cudaMemsetAsync(problem.sums, 0, sizeof(int64_t) * num_rows * problem.num_experts, stream));
    launch(problem, num_rows, false, stream);
}

}  // namespace tandem::cuda
