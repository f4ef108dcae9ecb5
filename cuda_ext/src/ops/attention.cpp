#include "ops/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace tandem {

namespace {

constexpr int kMaxStates = 64;  // (row, head) pairs of one block of rows
constexpr int kMaxBlockRows = 8;
constexpr int64_t kLeastMerges = 32;  // of one part: merging a span takes some 50 ns

// The rows of one item: consecutive, and all query heads of one key/value head.
struct Block {
    int first_row;
    int num_rows;
    int kv_head;
    int group;  // query heads per key/value head
};

// Running softmax of every (row, head) of a block.
struct Sums {
    SoftmaxState states[kMaxStates];
    alignas(64) float out[kMaxStates * kMaxHeadDim];

    void clear(int num, int head_dim) {
        std::fill(states, states + num, SoftmaxState{-std::numeric_limits<float>::infinity(), 0.0f});
        std::fill(out, out + int64_t{num} * head_dim, 0.0f);
    }
};

int block_rows(int group) {
    return std::clamp(kMaxStates / group, 1, kMaxBlockRows);
}

// A tile's keys and values as floats: where they lie if they are floats, else widened into scratch.
struct Tile {
    const float* keys;
    const float* values;
};

Tile load_tile(const AttentionProblem& p, int kv_head, int64_t tile, float* scratch) {
    const std::byte *keys = p.kv.key_tile(kv_head, tile), *values = p.kv.value_tile(kv_head, tile);
    const int dim = p.kv.head_dim;
    const int64_t num = int64_t{kKvTile} * dim;
    if (p.kv.type == KvType::f32) return {reinterpret_cast<const float*>(keys), reinterpret_cast<const float*>(values)};
    if (p.kv.type == KvType::int8) {
        const auto scales_of = [&](const std::byte* of) { return reinterpret_cast<const uint16_t*>(of + num); };
        p.kernels->widen_keys(reinterpret_cast<const int8_t*>(keys), scales_of(keys), dim, scratch);
        p.kernels->widen_values(reinterpret_cast<const int8_t*>(values), scales_of(values), dim, scratch + num);
    } else {
        p.kernels->widen(reinterpret_cast<const uint16_t*>(keys), num, scratch);
        p.kernels->widen(reinterpret_cast<const uint16_t*>(values), num, scratch + num);
    }
    return {scratch, scratch + num};
}

// One span for all rows of a block that see any of it. `sums` has been cleared.
void attend_span(const AttentionProblem& p, const Window& window, const Block& block, int64_t span, Sums& sums) {
    alignas(64) float scratch[2 * kKvTile * kMaxHeadDim];
    const int dim = p.kv.head_dim;
    const int64_t last = window.position + block.first_row + block.num_rows - 1;
    const int64_t end = std::min((span + 1) * (kSpan / kKvTile), last / kKvTile + 1);
    for (int64_t tile = span * (kSpan / kKvTile); tile < end; tile++) {
        const Tile loaded = load_tile(p, block.kv_head, tile, scratch);
        for (int r = 0; r < block.num_rows; r++) {
            const int64_t row = block.first_row + r, seen = window.position + row + 1 - tile * kKvTile;
            if (seen <= 0) continue;
            const float* query = p.query + (row * p.query_heads + block.kv_head * block.group) * dim;
            p.kernels->attend_tile({query, loaded.keys, loaded.values, block.group, dim,
                                    static_cast<int>(std::min<int64_t>(seen, kKvTile)), p.scale, sums.states + r * block.group,
                                    sums.out + int64_t{r} * block.group * dim});
        }
    }
}

float exp_of(const AttentionProblem& p, float x, float max) {
    float out;
    p.kernels->exp_below(&x, max, 1, &out);
    return out;
}

void merge(const AttentionProblem& p, const SoftmaxState& span, const float* span_out, SoftmaxState& total, float* out) {
    const float max = span.max > total.max ? span.max : total.max;
    const float a = exp_of(p, total.max, max), b = exp_of(p, span.max, max);
    total.sum = std::fma(total.sum, a, span.sum * b);
    total.max = max;
    p.kernels->merge_scaled(a, b, span_out, p.kv.head_dim, out);
}

void finish(const AttentionProblem& p, const SoftmaxState& total, float* out) {
    const float inverse = 1.0f / total.sum;
    for (int d = 0; d < p.kv.head_dim; d++) out[d] *= inverse;
}

float* out_of(const AttentionProblem& p, int64_t row, int head) {
    return p.out + (row * p.query_heads + head) * p.kv.head_dim;
}

// All spans of a block of rows, in one thread.
void attend_block(const AttentionProblem& p, const Window& window, const Block& block) {
    Sums sums;
    const int dim = p.kv.head_dim, num = block.num_rows * block.group;
    SoftmaxState totals[kMaxStates];
    std::fill(totals, totals + num, SoftmaxState{-std::numeric_limits<float>::infinity(), 0.0f});
    for (int r = 0; r < block.num_rows; r++) {
        float* out = out_of(p, block.first_row + r, block.kv_head * block.group);
        std::fill(out, out + int64_t{block.group} * dim, 0.0f);
    }
    const int64_t last = window.position + block.first_row + block.num_rows - 1;
    for (int64_t span = 0; span <= last / kSpan; span++) {
        sums.clear(num, dim);
        attend_span(p, window, block, span, sums);
        for (int i = 0; i < num; i++) {
            const int64_t row = block.first_row + i / block.group;
            if (span * kSpan > window.position + row) continue;
            merge(p, sums.states[i], sums.out + int64_t{i} * dim, totals[i],
                  out_of(p, row, block.kv_head * block.group + i % block.group));
        }
    }
    for (int i = 0; i < num; i++)
        finish(p, totals[i], out_of(p, block.first_row + i / block.group, block.kv_head * block.group + i % block.group));
}

float* stored_span(const AttentionProblem& p, int64_t row, int head, int64_t span) {
    return p.spans + ((row * p.query_heads + head) * p.num_spans + span) * (p.kv.head_dim + 2);
}

// One span of a block of rows, left in `spans`.
void attend_split(const AttentionProblem& p, const Window& window, const Block& block, int64_t span) {
    Sums sums;
    const int dim = p.kv.head_dim, num = block.num_rows * block.group;
    sums.clear(num, dim);
    attend_span(p, window, block, span, sums);
    for (int i = 0; i < num; i++) {
        float* stored = stored_span(p, block.first_row + i / block.group, block.kv_head * block.group + i % block.group, span);
        std::copy_n(sums.out + int64_t{i} * dim, dim, stored);
        stored[dim] = sums.states[i].max;
        stored[dim + 1] = sums.states[i].sum;
    }
}

void merge_split(const AttentionProblem& p, const Window& window, int64_t row, int head) {
    SoftmaxState total{-std::numeric_limits<float>::infinity(), 0.0f};
    const int dim = p.kv.head_dim;
    float* out = out_of(p, row, head);
    std::fill_n(out, dim, 0.0f);
    for (int64_t span = 0; span * kSpan <= window.position + row; span++) {
        const float* stored = stored_span(p, row, head, span);
        merge(p, {stored[dim], stored[dim + 1]}, stored, total, out);
    }
    finish(p, total, out);
}

}  // namespace

void attention(Pool& pool, const AttentionProblem& p, const Window& window) {
    const int group = p.query_heads / p.kv.num_heads, rows = block_rows(group);
    const int64_t blocks = (window.num_rows + rows - 1) / rows;
    const auto block_of = [&](int64_t block, int64_t kv_head) {
        const int first = static_cast<int>(block) * rows;
        return Block{first, std::min(rows, window.num_rows - first), static_cast<int>(kv_head), group};
    };
    if (window.num_rows > kSplitRows) {
        pool.parallel_for(blocks * p.kv.num_heads, 1, [&](int64_t begin, int64_t end) {
            // Late rows see most positions: they come first, so that the last items are small.
            for (int64_t item = begin; item < end; item++)
                attend_block(p, window, block_of(blocks - 1 - item / p.kv.num_heads, item % p.kv.num_heads));
        });
        return;
    }
    const int64_t spans = (window.position + window.num_rows - 1) / kSpan + 1;
    pool.parallel_for(blocks * p.kv.num_heads * spans, 1, [&](int64_t begin, int64_t end) {
        for (int64_t item = begin; item < end; item++) {
            const int64_t head = item / spans;
            attend_split(p, window, block_of(head / p.kv.num_heads, head % p.kv.num_heads), item % spans);
        }
    });
    const int64_t num_items = int64_t{window.num_rows} * p.query_heads;
    pool.parallel_for(num_items, std::max(kLeastMerges / spans, pool.grain_of(num_items, 2)), [&](int64_t begin, int64_t end) {
        for (int64_t item = begin; item < end; item++)
            merge_split(p, window, item / p.query_heads, static_cast<int>(item % p.query_heads));
    });
}

}  // namespace tandem
