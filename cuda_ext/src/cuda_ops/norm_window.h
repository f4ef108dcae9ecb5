// RMS norm of a window's rows, for kernels that do not norm for themselves (those of several rows): the bits of ops/norm.h.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda_ops/miss_post.h"
#include "quant/row.h"

namespace tandem::cuda {

struct NormWindowProblem {
    int32_t num_rows;
    const float* x;      // [rows, width], 16-byte aligned
    const float* gamma;  // [width], 16-byte aligned
    int32_t width;       // a multiple of 4; of 32 where groups are wanted
    float eps;
    quant::ActGroup* groups;  // [rows, ceil(width / 256)], or null
    float* values;            // [rows, width], or null
    MissState* state;         // is told 1 / rms of the rows before the layer's experts; or null
    int32_t layer;
};

// `dependent`: a programmatic dependent launch.
void norm_window(const NormWindowProblem& problem, bool dependent, cudaStream_t stream);

}  // namespace tandem::cuda
