// Attention of a window's rows over the key/value cache: row at position p sees positions 0..p.
//
// Order: positions in spans of kSpan, a span in tiles of kKvTile (attend_tile in vector.h); every span starts from
// max -inf, sum 0, out 0. Spans are merged one after the other:
//   max' = max(max, m); a = exp(max - max'), b = exp(m - max'); sum = fmaf(sum, a, s * b); out = fmaf(out, a, o * b)
// and the result is out * (1 / sum). Spans are absolute, so it does not matter which thread takes them or how many rows a
// window has.
#pragma once
#include "ops/rotary.h"

namespace tandem {

constexpr int kSpan = 256;
constexpr int kSplitRows = 8;  // up to this many rows each span is an item of its own

struct AttentionProblem {
    const float* query;  // [rows, query_heads * head_dim]
    int query_heads;
    KvLayer kv;
    float scale;
    float* spans;  // [min(rows, kSplitRows), query_heads, spans of the context, head_dim + 2]: out, max, sum of each span
    int64_t num_spans;
    float* out;  // [rows, query_heads * head_dim]
    const VectorKernels* kernels;
};

void attention(Pool& pool, const AttentionProblem& problem, const Window& window);

}  // namespace tandem
