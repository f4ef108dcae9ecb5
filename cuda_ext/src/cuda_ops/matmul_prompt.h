// out[row, r] = weight row r . input row `row` for a prompt's chunk, by tensor cores; up to three matrices over the same input.
//
// Weights and inputs are rounded to half precision, sums are single precision. A row's bits do not depend on the other rows,
// nor on where the weights lie. A residual is added last, in one rounded sum.
#pragma once
#include <cuda_runtime.h>

#include "cuda_ops/half_rows.h"
#include "cuda_ops/matrix.h"

namespace tandem::cuda {

constexpr int kMaxPromptParts = 3;

struct MatmulPromptPart {
    DeviceMatrix weights;   // rows: a multiple of 8; columns: the width of x
    float* out;             // [rows, weights.rows]
    const float* residual;  // [rows, weights.rows], may be `out`; or null
};

struct MatmulPromptProblem {
    HalfRows x;
    MatmulPromptPart parts[kMaxPromptParts];
    int num_parts;
};

// Throws std::invalid_argument for sizes beyond these rules.
void matmul_prompt(const MatmulPromptProblem& problem, int num_rows, cudaStream_t stream);

}  // namespace tandem::cuda
