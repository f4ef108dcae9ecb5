// RMS norm and quantisation of rows.
//
// Order: sum of squares in 32 chains, acc[i % 32] += x[i] * x[i] (product and sum rounded each), then the tree 16, 8, 4, 2, 1;
// inverse = 1 / sqrt(sum / width + eps). y[i] = x[i] * gamma[i] is quantised and `inverse` multiplies the block scales;
// values[i] = y[i] * inverse.
#pragma once
#include "ops/activations.h"
#include "ops/window.h"

namespace tandem {

struct NormProblem {
    const float* x;      // [rows, width]
    const float* gamma;  // [width]
    int64_t width;
    float eps;
    Rows rows;
    float* values;            // [rows of `rows`, width]; may not be x
    float* inverse;           // [rows of `rows`] 1 / rms, or null
    quant::ActGroup* groups;  // [rows of `rows`, groups of width], or null
    const quant::RowKernels* kernels;
};

void norm(Pool& pool, const NormProblem& problem, const Window& window);

// Quantises rows as they are.
struct QuantiseProblem {
    const float* x;  // [rows, width]
    int64_t width;
    quant::ActGroup* groups;  // [rows, groups of width]
    const quant::RowKernels* kernels;
};

void quantise(Pool& pool, const QuantiseProblem& problem, const Window& window);

// 1 / sqrt(mean of squares + eps) in the order above.
float inverse_rms(const float* x, int64_t width, float eps);

}  // namespace tandem
