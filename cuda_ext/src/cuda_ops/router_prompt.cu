#include "base/require.h"
#include "cuda_ops/route_prompt.h"
#include "device/launch.h"
#include "device/primitives.cuh"
#include "quant/arithmetic.h"

namespace tandem::cuda {

namespace {

constexpr int kWarps = 4;
constexpr int kRows = 8;     // of a warp
constexpr int kExperts = 8;  // of a warp
constexpr int kSums = kRows * kExperts;

// Adds each of `num` sums over the lanes that differ in bit `width`, as the tree of a float row does; half as many remain, and the
// lane's bit says which of two neighbours it has kept.
template <int num>
__device__ __forceinline__ void fold(float (&sums)[kSums], int width, int lane) {
    const bool second = lane & width;
#pragma unroll
    for (int i = 0; i < num / 2; i++) {
        const float kept = second ? sums[2 * i + 1] : sums[2 * i], given = second ? sums[2 * i] : sums[2 * i + 1];
        sums[i] = quant::add(kept, __shfl_xor_sync(~0u, given, width));
    }
}

// Lane j has chain j of 32 for every row and expert of the warp.
__device__ __forceinline__ void add_products(const RouterPromptProblem& p, const int (&rows)[kRows], const int (&experts)[kExperts],
                                             float (&sums)[kSums], int lane) {
#pragma unroll 2
    for (int i = lane; i < p.width; i += 32) {
        float x[kRows], w[kExperts];
#pragma unroll
        for (int r = 0; r < kRows; r++) x[r] = __ldg(p.values + static_cast<size_t>(rows[r]) * p.width + i);
#pragma unroll
        for (int e = 0; e < kExperts; e++) w[e] = __ldg(p.weights + static_cast<size_t>(experts[e]) * p.width + i);
#pragma unroll
        for (int r = 0; r < kRows; r++)
#pragma unroll
            for (int e = 0; e < kExperts; e++) sums[r * kExperts + e] = quant::fma(w[e], x[r], sums[r * kExperts + e]);
    }
}

__global__ void __launch_bounds__(32 * kWarps) router_kernel(RouterPromptProblem p, int num_rows) {
    const int lane = threadIdx.x % 32, first_row = blockIdx.y * kRows;
    const int first_expert = (blockIdx.x * kWarps + threadIdx.x / 32) * kExperts;
    if (first_expert >= p.num_experts) return;
    int rows[kRows], experts[kExperts];  // beyond the end the last one again
#pragma unroll
    for (int i = 0; i < kRows; i++) rows[i] = min(first_row + i, num_rows - 1);
#pragma unroll
    for (int i = 0; i < kExperts; i++) experts[i] = min(first_expert + i, p.num_experts - 1);
    float sums[kSums] = {};
    add_products(p, rows, experts, sums, lane);
    fold<64>(sums, 16, lane);
    fold<32>(sums, 8, lane);
    fold<16>(sums, 4, lane);
    fold<8>(sums, 2, lane);
    fold<4>(sums, 1, lane);
    const int low = lane >> 4 | (lane >> 2 & 2) | (lane & 4) | (lane << 2 & 8) | (lane << 4 & 16);  // the lane's bits, reversed
#pragma unroll
    for (int i = 0; i < kSums / 32; i++) {
        const int index = 32 * i + low, row = first_row + index / kExperts, expert = first_expert + index % kExperts;
        if (row < num_rows && expert < p.num_experts)
            p.logits[static_cast<size_t>(row) * p.num_experts + expert] = quant::add(sums[i], 0.0f);
    }
}

}  // namespace

void router_prompt(const RouterPromptProblem& problem, int num_rows, cudaStream_t stream) {
    require(problem.width % 32 == 0, "a router over " + std::to_string(problem.width) + " values: no multiple of 32");
    if (num_rows == 0) return;
    const int groups = (problem.num_experts + kExperts - 1) / kExperts;
    const dim3 grid((groups + kWarps - 1) / kWarps, (num_rows + kRows - 1) / kRows);
    device::launch({grid, dim3(32 * kWarps), 0, stream}, router_kernel, problem, num_rows);
}

}  // namespace tandem::cuda
