// Norm and rotation of a chunk's heads, and the way of its keys and values into the cache; the bits of ops/rotary.h.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "ops/rotary.h"

namespace tandem::cuda {

struct RotaryPromptProblem {
    const float* query;  // [rows, query_heads * head_dim]
    const float* key;    // [rows, kv.num_heads * head_dim]
    const float* value;
    int query_heads;
    const float* query_gamma;  // [head_dim], or null: no norm
    const float* key_gamma;
    float eps;
    const float2* angles;   // [context, head_dim / 2] (cosine, sine)
    KvLayer kv;             // head_dim a multiple of 32, up to kMaxHeadDim
    float* turned;          // [rows, query_heads * head_dim], may be `query`; or null
    uint16_t* half_turned;  // the same, rounded once to IEEE half precision, 4-byte aligned; or null
};

// Rows lie at `position`, `position` + 1, ... Throws std::invalid_argument for a head_dim beyond the rules.
void rotary(const RotaryPromptProblem& problem, int64_t position, int num_rows, cudaStream_t stream);

}  // namespace tandem::cuda
