// Rows of a prompt's chunk for the tensor cores: normed, or as they are.
#pragma once
#include <cuda_runtime.h>

#include "cuda_ops/half_rows.h"

namespace tandem::cuda {

// out = x * gamma / rms(x). `values` has the bits of ops/norm.h; the halves are those values rounded once.
struct NormPromptProblem {
    const float* x;      // [rows, width]
    const float* gamma;  // [width]
    float eps;
    HalfRows out;   // [rows, width]
    float* values;  // [rows, width], may be x; or null
};

void norm_prompt(const NormPromptProblem& problem, int num_rows, cudaStream_t stream);

// out = x
struct HalvePromptProblem {
    const float* x;  // [rows, width]
    HalfRows out;
};

void halve_prompt(const HalvePromptProblem& problem, int num_rows, cudaStream_t stream);

}  // namespace tandem::cuda
