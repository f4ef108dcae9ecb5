// Products of matrices and the RMS norm of a window's rows: the bits of ops/norm.h and then ops/matmul.h. One row takes one launch.
//
// Serves query, key and value of attention, a router, and the head: rows of the window that want no logits are left out by
// pointing `x` at the first one that does.
#pragma once
#include "cuda_ops/matmul_window.h"

namespace tandem::cuda {

struct NormMatmulWindowProblem {
    int32_t num_rows;    // 1..8
    const float* x;      // [rows, columns], 16-byte aligned
    const float* gamma;  // [columns], 16-byte aligned
    float eps;
    Products products;
    quant::ActGroup* groups;  // as in MatmulWindowProblem: where several rows go in between
    float* values;
};

void norm_matmul_window(const NormMatmulWindowProblem& problem, const CardShape& card, bool dependent, cudaStream_t stream);

}  // namespace tandem::cuda
