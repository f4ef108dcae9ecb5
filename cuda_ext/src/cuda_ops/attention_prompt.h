// Attention of a chunk's rows over the key/value cache by tensor cores: the row at position p sees positions 0..p.
//
// out = softmax(scale * query . keys) . values, tile by tile of kKvTile positions from position 0 on, with a running maximum
// and sum in single precision; queries, keys, values and the weights of values are halves. What a row does not see counts as
// exact zeros, so its bits depend on its position and the cache alone, not on the chunk that it comes in.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "ops/rotary.h"

namespace tandem::cuda {

struct AttentionPromptProblem {
    const uint16_t* query;  // [rows, query_heads * head_dim] IEEE half precision, rotated; 16-byte aligned
    int query_heads;        // a multiple of kv.num_heads
    KvLayer kv;             // holds the rows' own keys and values; head_dim 64, 96, 128, 192 or 256; 16-byte aligned
    float scale;
    float* out;  // [rows, query_heads * head_dim], 8-byte aligned
};

// Rows lie at `position`, `position` + 1, ... Throws std::invalid_argument for a head_dim that is not supported.
void attention_prompt(const AttentionPromptProblem& problem, int64_t position, int num_rows, cudaStream_t stream);

}  // namespace tandem::cuda
