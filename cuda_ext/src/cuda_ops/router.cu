#include "cuda_ops/router.h"

#include <algorithm>

#include "cuda_ops/router_sum.cuh"
#include "device/launch.h"
#include "device/primitives.cuh"

namespace tandem::cuda {

namespace {

constexpr int kThreads = 128;  // a thread has an expert
constexpr int kRows = 8;       // of a block
constexpr int kSlab = 128;     // values of x that lie in shared memory
constexpr int kWindowParts = 16;

// A block has kThreads experts, kRows rows and an even share of the groups. `adds`: others have the rest of the groups.
template <bool adds>
__global__ void __launch_bounds__(kThreads) router_kernel(const RouterRowsProblem p, int num_rows) {
    __shared__ float y[kSlab][kRows];
    if constexpr (adds) {
        device::wait_prerequisites();
        device::launch_dependents();
    }
    const int expert = blockIdx.x * kThreads + threadIdx.x, first_row = blockIdx.y * kRows;
    const int64_t groups = router_groups(p.width), parts = gridDim.z;
    const int begin = static_cast<int>(groups * blockIdx.z / parts) * kRouterGroup,
              end = min(static_cast<int>(groups * (blockIdx.z + 1) / parts) * kRouterGroup, p.width);
    int64_t sums[kRows] = {};
    for (int slab = begin; slab < end; slab += kSlab) {
        const int num = min(kSlab, end - slab);
        for (int i = threadIdx.x; i < num * kRows; i += kThreads) {
            const int row = first_row + i / num, at = slab + i % num;
            y[i % num][i / num] =
                row < num_rows ? quant::mul(__ldcg(p.x + static_cast<int64_t>(row) * p.width + at), __ldg(p.gamma + at)) : 0.0f;
        }
        __syncthreads();
        for (int group = 0; expert < p.num_experts && group < num; group += kRouterGroup) {
            const float* weights = p.weights + static_cast<int64_t>(slab + group) * p.num_experts + expert;
            float dots[kRows] = {};
#pragma unroll 4
            for (int i = 0; i < min(kRouterGroup, num - group); i++) {
                const float weight = __ldg(weights + static_cast<int64_t>(i) * p.num_experts);
#pragma unroll
                for (int r = 0; r < kRows; r++) dots[r] = quant::fma(weight, y[group + i][r], dots[r]);
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
        int64_t* sum = p.sums + static_cast<int64_t>(first_row + r) * p.num_experts + expert;
        if constexpr (adds)
            add_router_sum(sum, sums[r]);
        else
            *sum = sums[r];
    }
}

dim3 grid_of(const RouterRowsProblem& p, int num_rows, int parts) {
    return {static_cast<unsigned>((p.num_experts + kThreads - 1) / kThreads), static_cast<unsigned>((num_rows + kRows - 1) / kRows),
            static_cast<unsigned>(parts)};
}

}  // namespace

void router_window(const RouterRowsProblem& problem, int num_rows, cudaStream_t stream) {
    const int parts = static_cast<int>(std::min<int64_t>(kWindowParts, router_groups(problem.width)));
    device::launch({grid_of(problem, num_rows, parts), dim3(kThreads), 0, stream, true}, router_kernel<true>, problem, num_rows);
}

void router_prompt(const RouterRowsProblem& problem, int num_rows, cudaStream_t stream) {
    if (num_rows == 0) return;
    device::launch({grid_of(problem, num_rows, 1), dim3(kThreads), 0, stream}, router_kernel<false>, problem, num_rows);
}

}  // namespace tandem::cuda
