#include "ops/rotary.h"

#include <algorithm>
#include <cmath>

#include "ops/norm.h"

namespace tandem {

namespace {

constexpr int64_t kLeastHeads = 4;  // of one part: a head takes less than half a microsecond

void norm_head(const float* x, const float* gamma, int dim, float eps, float* out) {
    if (!gamma) {
        std::copy(x, x + dim, out);
        return;
    }
    const float inverse = inverse_rms(x, dim, eps);
    for (int i = 0; i < dim; i++) out[i] = x[i] * gamma[i] * inverse;
}

void rotate_head(const float* angles, int dim, float* x) {
    const int half = dim / 2;
    for (int i = 0; i < half; i++) {
        const float cosine = angles[2 * i], sine = angles[2 * i + 1], a = x[i], b = x[i + half];
        x[i] = a * cosine - b * sine;
        x[i + half] = b * cosine + a * sine;
    }
}

template <class T>
void scatter(const T* x, int dim, int64_t step, T* out) {
    for (int i = 0; i < dim; i++) out[i * step] = x[i];
}

// Stores one head's vector with `step` values between its elements.
void store(const RotaryProblem& p, const float* x, int64_t step, std::byte* base, int64_t at) {
    const int dim = p.kv.head_dim;
    if (p.kv.type == KvType::f32) {
        scatter(x, dim, step, reinterpret_cast<float*>(base) + at);
        return;
    }
    uint16_t half[kMaxHeadDim];
    p.kernels->narrow(x, dim, half);
    scatter(half, dim, step, reinterpret_cast<uint16_t*>(base) + at);
}

void rotate_query(const RotaryProblem& p, int64_t row, int head) {
    const int dim = p.kv.head_dim;
    float* x = p.query + (row * p.query_heads + head) * dim;
    norm_head(x, p.query_gamma, dim, p.eps, x);
    rotate_head(p.angles + row * dim, dim, x);
}

void store_position(const RotaryProblem& p, int64_t position, int64_t row, int head) {
    const int dim = p.kv.head_dim;
    const int64_t from = (row * p.kv.num_heads + head) * dim;
    const int64_t tile = p.kv.tile_at(head, position / kKvTile), within = position % kKvTile;
    float key[kMaxHeadDim];
    norm_head(p.key + from, p.key_gamma, dim, p.eps, key);
    rotate_head(p.angles + row * dim, dim, key);
    store(p, key, kKvTile, p.kv.keys, tile + within);
    store(p, p.value + from, 1, p.kv.values, tile + within * dim);
}

}  // namespace

void angles(Pool& pool, const AnglesProblem& p, const Window& window) {
    const int64_t half = static_cast<int64_t>(p.frequencies.size());
    pool.parallel_for(window.num_rows, 1, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            for (int64_t i = 0; i < half; i++) {
                const double angle = static_cast<double>(window.position + row) * p.frequencies[i];
                p.out[(row * half + i) * 2] = static_cast<float>(std::cos(angle) * p.magnitude);
                p.out[(row * half + i) * 2 + 1] = static_cast<float>(std::sin(angle) * p.magnitude);
            }
        }
    });
}

void rotary(Pool& pool, const RotaryProblem& p, const Window& window) {
    const int64_t heads = p.query_heads + p.kv.num_heads;
    const int64_t num_items = window.num_rows * heads;
    pool.parallel_for(num_items, std::max(kLeastHeads, pool.grain_of(num_items, 2)), [&](int64_t begin, int64_t end) {
        for (int64_t item = begin; item < end; item++) {
            const int64_t row = item / heads;
            const int head = static_cast<int>(item % heads);
            if (head < p.query_heads) {
                rotate_query(p, row, head);
            } else {
                store_position(p, window.position + row, row, head - p.query_heads);
            }
        }
    });
}

}  // namespace tandem
