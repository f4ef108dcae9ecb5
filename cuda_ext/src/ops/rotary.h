// Rotary positions (NeoX pairing), the norm of query and key heads, and the way into the key/value cache.
//
// angles: cos and sin of position * frequency[i], computed in double and rounded once, times `magnitude` in double.
// A head: y[i] = (x[i] * gamma[i]) * inverse, inverse as in norm.h; then with h = head_dim / 2 and i < h
//   out[i] = y[i] * cos[i] - y[i + h] * sin[i],   out[i + h] = y[i + h] * cos[i] + y[i] * sin[i],   every operation rounded.
// Keys and values are stored as they are or rounded to half precision.
#pragma once
#include <cstddef>
#include <vector>

#include "ops/vector.h"
#include "ops/window.h"

namespace tandem {

struct AnglesProblem {
    std::vector<double> frequencies;  // [head_dim / 2], radians per position
    double magnitude;                 // of YaRN; else 1
    float* out;                       // [rows, head_dim / 2] cosines, sines alternating
};

void angles(Pool& pool, const AnglesProblem& problem, const Window& window);

enum class KvType { f16, f32 };

// One layer's keys and values, by head and tile of kKvTile positions:
//   keys:   [kv_heads, tiles, head_dim, kKvTile]   (a score kernel reads one dimension of all positions at once)
//   values: [kv_heads, tiles, kKvTile, head_dim]
struct KvLayer {
    KvType type;
    int num_heads;
    int head_dim;
    int64_t num_tiles;
    std::byte* keys;
    std::byte* values;

    int64_t tile_values() const { return int64_t{kKvTile} * head_dim; }
    // Index of the first value of a tile.
    int64_t tile_at(int head, int64_t tile) const { return (head * num_tiles + tile) * tile_values(); }
};

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
