// Sums of a router on the card (ops/router_sum.h): the bits of ops/router.h.
//
// A window of one row has them from the kernel that makes its hidden row (cuda_ops/matmul_window.h); these are for all others.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace tandem::cuda {

struct RouterRowsProblem {
    const float* x;        // [rows, width]
    const float* gamma;    // [width]
    const float* weights;  // [width, experts]
    int32_t width;
    int32_t num_experts;
    int64_t* sums;  // [rows, experts]
};

// Adds to the sums of a window's rows, which are zero; a programmatic dependent launch.
void router_window(const RouterRowsProblem& problem, int num_rows, cudaStream_t stream);

// Writes the sums of a chunk's rows.
void router_prompt(const RouterRowsProblem& problem, int num_rows, cudaStream_t stream);

}  // namespace tandem::cuda
