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

// Where a head's vector goes in a tile.
struct TilePlace {
    std::byte* tile;
    int within;     // position
    int64_t first;  // value
    int64_t step;   // values from one dimension to the next
};

void store_int8(const float* x, int dim, const TilePlace& place) {
    int8_t rounded[kMaxHeadDim];
    auto* scales = reinterpret_cast<uint16_t*>(place.tile + kKvTile * dim) + place.within;
    for (int begin = 0; begin < dim; begin += kKvGroup, scales += kKvTile) {
        const int end = std::min(begin + kKvGroup, dim);
        uint32_t amax = 0;
        for (int i = begin; i < end; i++) amax = std::max(amax, quant::float_bits(x[i]) & 0x7fffffff);
        const KvScale scale = kv_scale(amax);
        for (int i = begin; i < end; i++) rounded[i] = kv_rounded(x[i], scale);
        *scales = scale.half;
    }
    scatter(rounded, dim, place.step, reinterpret_cast<int8_t*>(place.tile) + place.first);
}

void store(const RotaryProblem& p, const float* x, const TilePlace& place) {
    const int dim = p.kv.head_dim;
    if (p.kv.type == KvType::int8) return store_int8(x, dim, place);
    if (p.kv.type == KvType::f32) return scatter(x, dim, place.step, reinterpret_cast<float*>(place.tile) + place.first);
    uint16_t half[kMaxHeadDim];
    p.kernels->narrow(x, dim, half);
    scatter(half, dim, place.step, reinterpret_cast<uint16_t*>(place.tile) + place.first);
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
    const int64_t tile = position / kKvTile;
    const int within = static_cast<int>(position % kKvTile);
    float key[kMaxHeadDim];
    norm_head(p.key + from, p.key_gamma, dim, p.eps, key);
    rotate_head(p.angles + row * dim, dim, key);
    store(p, key, {p.kv.key_tile(head, tile), within, within, kKvTile});
    store(p, p.value + from, {p.kv.value_tile(head, tile), within, int64_t{within} * dim, 1});
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
