// Attention of a window of 1..8 rows: norm and rotation of the heads, append to the cache, attention, quantisation of the
// result; the bits of ops/rotary.h, ops/attention.h and ops/norm.h's quantise.
//
// One launch. A block has one key/value head, a part of the query heads that share it, and every `span_blocks`-th span of
// kSpan positions: it copies the span's tiles into shared memory, adds the window's own keys and values to them, and leaves
// (out, max, sum) of the span in `spans`. The last block of a part merges the spans in order. Blocks whose spans lie beyond
// the window's end leave at once, so a launch is good for every position of the context.
//
// Before wait_prerequisites() old positions of the cache and the state are read, after it query, key and value.
#pragma once
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "cuda_ops/window_state.h"
#include "ops/attention.h"

namespace tandem::cuda {

struct AttentionWindowProblem {
    const WindowState* state;
    int num_rows;        // 1..kMaxWindowRows
    const float* query;  // [rows, query_heads * head_dim], as the product left it
    const float* key;    // [rows, kv.num_heads * head_dim]
    const float* value;
    int query_heads;           // a multiple of kv.num_heads, at most kMaxGroupHeads per key/value head
    const float* query_gamma;  // [head_dim], or null: no norm
    const float* key_gamma;
    float eps;
    const float2* angles;  // [context, head_dim / 2] (cosine, sine)
    KvLayer kv;            // head_dim a multiple of 32, 64..kMaxHeadDim; memory 16-byte aligned
    float scale;
    float* spans;             // scratch of attention_window_floats(), 16-byte aligned; free for others between launches
    uint32_t* counters;       // [query_heads], zero before the first launch and after every launch
    int64_t num_spans;        // spans of the context
    float* out;               // [rows, query_heads * head_dim], or null
    quant::ActGroup* groups;  // [rows, groups of query_heads * head_dim], or null
    int64_t* sums;            // [rows, num_sums] of the router that follows, made zero; or null
    int num_sums;
};

// What the launch is made for: a card, and contexts of about this many spans (any position below 2^31 is computed rightly).
struct AttentionWindowShape {
    int num_multiprocessors;
    size_t shared_bytes;  // that a block may have
    int64_t usual_spans;  // 1..num_spans
};

// How the work is cut; chosen by plan_attention_window, shown for tests.
struct AttentionWindowPlan {
    int part_heads;   // query heads of a block
    int num_parts;    // of a key/value head
    int num_queries;  // rows and part_heads, each rounded up to a power of two, multiplied
    int chunk_tiles;  // tiles that lie in shared memory at once: 1, 2 or 4
    int span_blocks;
    size_t shared_bytes;
};

// Throws std::invalid_argument where the shape is not supported or one tile does not fit.
AttentionWindowPlan plan_attention_window(const AttentionWindowProblem& problem, const AttentionWindowShape& shape);

inline int64_t attention_window_floats(int num_rows, int query_heads, int64_t num_spans, int head_dim) {
    return int64_t{num_rows} * query_heads * num_spans * (head_dim + 2);
}

void attention_window(const AttentionWindowProblem& problem, const AttentionWindowPlan& plan, bool dependent, cudaStream_t stream);

}  // namespace tandem::cuda
