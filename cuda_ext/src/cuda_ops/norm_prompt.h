// Rows of a prompt's chunk for the tensor cores: normed, or as they are.
#pragma once
#include <cuda_runtime.h>

#include "cuda_ops/half_rows.h"

namespace tandem::cuda {

// out = x * gamma / rms(x): the values of ops/norm.h, rounded once.
struct NormPromptProblem {
    const float* x;      // [rows, width]
    const float* gamma;  // [width]
    float eps;
    HalfRows out;    // [rows, width]
    float* inverse;  // [rows] 1 / rms, the bits of ops/norm.h; or null
};

void norm_prompt(const NormPromptProblem& problem, int num_rows, cudaStream_t stream);

// out = x
struct HalvePromptProblem {
    const float* x;  // [rows, width]
    HalfRows out;
};

void halve_prompt(const HalvePromptProblem& problem, int num_rows, cudaStream_t stream);

}  // namespace tandem::cuda
