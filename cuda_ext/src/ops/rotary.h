// Rotary positions (NeoX pairing), the norm of query and key heads, and the way into the key/value cache.
//
// angles: cos and sin of position * frequency[i], computed in double and rounded once, times `magnitude` in double.
// A head: y[i] = (x[i] * gamma[i]) * inverse, inverse as in norm.h; then with h = head_dim / 2 and i < h
//   out[i] = y[i] * cos[i] - y[i + h] * sin[i],   out[i + h] = y[i + h] * cos[i] + y[i] * sin[i],   every operation rounded.
// Keys and values are stored as they are, rounded to half precision, or as int8 (kv_cache.h).
#pragma once
#include <cstddef>
#include <vector>

#include "ops/kv_cache.h"
#include "ops/vector.h"
#include "ops/window.h"

namespace tandem {

struct AnglesProblem {
    std::vector<double> frequencies;  // [head_dim / 2], radians per position
    double magnitude;                 // of YaRN; else 1
    float* out;                       // [rows, head_dim / 2] cosines, sines alternating
};

void angles(Pool& pool, const AnglesProblem& problem, const Window& window);

struct RotaryProblem {
    float* query;      // [rows, query_heads * head_dim], normed and rotated in place
    const float* key;  // [rows, kv.num_heads * head_dim]
    const float* value;
    int query_heads;
    const float* query_gamma;  // [head_dim], or null: no norm
    const float* key_gamma;
    float eps;
    const float* angles;
    KvLayer kv;
    const VectorKernels* kernels;
};

void rotary(Pool& pool, const RotaryProblem& problem, const Window& window);

}  // namespace tandem
