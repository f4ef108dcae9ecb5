// Float kernels of the operations that profit from wide registers, one table per instruction set, all with the same bits.
#pragma once
#include <cstdint>

#include "base/host_device.h"
#include "quant/row.h"

namespace tandem {

constexpr int kKvTile = 64;         // positions of one tile of the key/value cache
constexpr int kKvGroup = 64;        // values of one head and position that share a scale in a cache of int8
constexpr int kMaxHeadDim = 256;    // of the attention kernels' scratch
constexpr int kMaxGroupHeads = 16;  // query heads that share one key/value head

TANDEM_HD constexpr int kv_groups(int head_dim) {
    return (head_dim + kKvGroup - 1) / kKvGroup;
}

// Softmax over the positions seen so far: their greatest score, and the sum of exp(score - max).
struct SoftmaxState {
    float max;
    float sum;
};

// The query heads of one row that share a key/value head, against one tile of positions.
struct TileProblem {
    const float* query;   // [num_heads, head_dim]
    const float* keys;    // [head_dim, kKvTile]
    const float* values;  // [kKvTile, head_dim]
    int num_heads;
    int head_dim;
    int count;  // 1..kKvTile: positions of the tile that the row sees
    float scale;
    SoftmaxState* states;  // [num_heads], updated
    float* out;            // [num_heads, head_dim], updated: sum of exp(score - max) * value
};

// Some neighbouring experts of a router, and one row.
struct RouterTile {
    const float* x;        // [width]
    const float* gamma;    // [width]
    const float* weights;  // [width, stride], from the first of these experts on
    int64_t stride;
    int64_t width;
    int num_experts;
    int64_t* sums;  // [num_experts]
};

struct VectorKernels {
    // out[i] = fmaf(weight, x[i], out[i])
    void (*add_scaled)(float weight, const float* x, int64_t num, float* out);
    // out[i] = fmaf(out[i], a, x[i] * b)
    void (*merge_scaled)(float a, float b, const float* x, int64_t num, float* out);
    // out[i] = exp(x[i] - max), argument clamped to [-87, 88]; the polynomial of docs/arithmetic.md
    void (*exp_below)(const float* x, float max, int64_t num, float* out);
    // score = (q . k) * scale, the dot product a chain of fmaf over the head's dimensions;
    // max' = max(max, scores); a = exp(max - max'); e_j = exp(score_j - max'); sum = fmaf(sum, a, sum8(e));
    // out[d] = out[d] * a, then fmaf(e_j, v_j[d], out[d]) for j rising.
    void (*attend_tile)(const TileProblem& problem);
    // IEEE half precision to float, exact, and back, to nearest even.
    void (*widen)(const uint16_t* x, int64_t num, float* out);
    void (*narrow)(const float* x, int64_t num, uint16_t* out);
    // A tile of int8 times its scales, exact: keys [head_dim, kKvTile], values [kKvTile, head_dim]; scales [groups, kKvTile].
    void (*widen_keys)(const int8_t* keys, const uint16_t* scales, int head_dim, float* out);
    void (*widen_values)(const int8_t* values, const uint16_t* scales, int head_dim, float* out);
    // ops/router_sum.h
    void (*router_sums)(const RouterTile& tile);
};

const VectorKernels& vector_kernels(quant::Isa isa);  // isa must run here

extern const VectorKernels kVectorPortable;
#ifdef TANDEM_X86
extern const VectorKernels kVectorAvx2;
extern const VectorKernels kVectorAvx512;
#endif

// Eight chains, element i in chain i % 8, then a tree; a fixed order that every register width can follow.
inline float sum8(const float* x, int64_t num) {
    float acc[8] = {};
    for (int64_t i = 0; i + 8 <= num; i += 8)
        for (int j = 0; j < 8; j++) acc[j] += x[i + j];
    for (int64_t i = num & ~int64_t{7}; i < num; i++) acc[i & 7] += x[i];
    return ((acc[0] + acc[4]) + (acc[2] + acc[6])) + ((acc[1] + acc[5]) + (acc[3] + acc[7]));
}

}  // namespace tandem
