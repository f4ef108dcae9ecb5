// out[row] = the embedding of token `row` of a window or chunk, exactly as its type defines it; the bits of ops/embed.h.
#pragma once
#include <cuda_runtime.h>

#include "cuda_ops/matrix.h"

namespace tandem::cuda {

struct EmbedProblem {
    const int32_t* tokens;  // [rows] on the card, below table.rows
    int32_t num_rows;
    DeviceMatrix table;  // [vocabulary, columns]
    float* out;          // [rows, columns]
};

void embed(const EmbedProblem& problem, bool dependent, cudaStream_t stream);

}  // namespace tandem::cuda
