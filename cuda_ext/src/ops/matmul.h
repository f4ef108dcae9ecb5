// out[row, r] = weight row r . input row `row`, for one or several matrices over the same input.
//
// The order of a dot product is that of the weight's type (docs/arithmetic.md). A residual is added last, in one rounded sum.
#pragma once
#include <vector>

#include "ops/activations.h"
#include "ops/window.h"

namespace tandem {

struct MatmulPart {
    Weights weights;
    float* out;             // [rows, weights.rows]
    const float* residual;  // [rows, weights.rows], may be `out`; or null
};

struct MatmulProblem {
    std::vector<MatmulPart> parts;
    Activations x;
    Rows rows;  // how many rows x has
    const quant::RowKernels* kernels;
};

void matmul(Pool& pool, const MatmulProblem& problem, const Window& window);

}  // namespace tandem
