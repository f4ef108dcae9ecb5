#include "ops/experts.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "ops/tiles.h"

namespace tandem {

namespace {

static_assert(kTile == 32);     // a whole tile of gate and up gives one block of activations
constexpr int kInputRows = 64;  // input rows of one kernel call
constexpr int kFewRows = 16;    // of a window: here a loop more costs more than reading all experts' input rows once per tile

// 32 values of one pair as a block of its quantised row; behind the last one the row's group is filled up with zeros.
void quantise_tile(const ExpertsProblem& p, const float* values, int64_t pair, int64_t r0) {
    constexpr int kPlaces = kGroupValues / kTile;
    quant::ActGroup& group = p.hidden_groups[pair * groups_of(p.down.columns) + r0 / kGroupValues];
    int place = static_cast<int>(r0 % kGroupValues / kTile);
    p.row_kernels->quantise_block(values, 1.0f, &group, place);
    if (r0 + kTile < p.down.columns) return;
    constexpr float kZeros[kTile] = {};
    while (++place < kPlaces) p.row_kernels->quantise_block(kZeros, 1.0f, &group, place);
}

// Tiles of an expert's block of 32 hidden values that are done: whoever does the last one quantises the block.
struct BlockTiles {
    alignas(64) std::atomic<int> done{0};
};

// One for each block of the experts in use. Of the thread that drives, which waits until nobody looks there any more.
BlockTiles* no_tiles_done(int64_t num_blocks) {
    thread_local std::vector<BlockTiles> blocks;
    if (blocks.size() < static_cast<size_t>(num_blocks)) blocks = std::vector<BlockTiles>(num_blocks);
    for (int64_t i = 0; i < num_blocks; i++) blocks[i].done.store(0, std::memory_order_relaxed);
    return blocks.data();
}

void gate_and_up(const ExpertsProblem& p, const ExpertRows& expert, int64_t r0, int tile) {
    const int64_t width = p.gate.rows;
    const int num_rows = static_cast<int>(std::min<int64_t>(tile, width - r0));
    quant::ActRow x[kInputRows];
    alignas(64) float gate[kInputRows * kTile], up[kInputRows * kTile];
    for (int first = 0; first < expert.count; first += kInputRows) {
        const int num_x = std::min(kInputRows, expert.count - first);
        const int32_t* order = p.routed.order + expert.first + first;
        for (int i = 0; i < num_x; i++) x[i] = p.x.row(order[i] / p.routed.top_k);
        for (const auto& [matrix, out] : {std::pair(&p.gate, gate), std::pair(&p.up, up)})
            p.row_kernels->dot(matrix->type, matrix->row(expert.blob, r0), matrix->row_bytes, num_rows, matrix->columns, x, num_x,
                               out, kTile);
        for (int i = 0; i < num_x; i++) {
            const int64_t place = int64_t{expert.first} + first + i;
            float* hidden = p.hidden + place * width + r0;
            p.row_kernels->swiglu(gate + i * kTile, up + i * kTile, num_rows, hidden);
            if (p.hidden_groups && tile == kTile) quantise_tile(p, hidden, place, r0);
        }
    }
}

void down(const ExpertsProblem& p, const ExpertRows& expert, int64_t r0, int num_rows) {
    const Activations hidden{p.hidden, p.hidden_groups, p.down.columns};
    quant::ActRow x[kInputRows];
    for (int first = 0; first < expert.count; first += kInputRows) {
        const int num_x = std::min(kInputRows, expert.count - first);
        const int64_t place = int64_t{expert.first} + first;
        for (int i = 0; i < num_x; i++) x[i] = hidden.row(place + i);
        p.row_kernels->dot(p.down.type, p.down.row(expert.blob, r0), p.down.row_bytes, num_rows, p.down.columns, x, num_x,
                           p.expert_rows + place * p.down.rows + r0, p.down.rows);
    }
}

void combine(const ExpertsProblem& p, int64_t row, int64_t r0, int num_rows) {
    alignas(64) float sum[kTile] = {};
    for (int k = 0; k < p.routed.top_k; k++) {
        const int64_t pair = row * p.routed.top_k + k;
        p.vector_kernels->add_scaled(p.routed.weights[pair], p.expert_rows + p.routed.places[pair] * p.down.rows + r0, num_rows,
                                     sum);
    }
    float* out = p.out + row * p.down.rows + r0;
    for (int r = 0; r < num_rows; r++) out[r] += sum[r];
}

int most_inputs(const Routed& routed) {
    int most = 0;
    for (int i = 0; i < *routed.num_experts; i++) most = std::max<int>(most, routed.experts[i].count);
    return most;
}

// From the routed input rows to the rows that `down` takes, in the order of Routed::order.
void hidden_rows(Pool& pool, const ExpertsProblem& p) {
    const int64_t used = *p.routed.num_experts, width = p.gate.rows;
    const int tile = tile_rows(used * width, most_inputs(p.routed), pool.num_active());
    const int64_t tiles = num_tiles(width, tile), blocks = num_tiles(width, kTile);
    BlockTiles* const of_blocks = tile < kTile && p.hidden_groups ? no_tiles_done(used * blocks) : nullptr;
    pool.parallel_for(used * tiles, [&](int64_t begin, int64_t end) {
        for (int64_t item = begin; item < end; item++) {
            const int64_t index = item / tiles, r0 = item % tiles * tile, block = r0 / kTile;
            const ExpertRows& expert = p.routed.experts[index];
            gate_and_up(p, expert, r0, tile);
            if (!of_blocks || of_blocks[index * blocks + block].done.fetch_add(1, std::memory_order_acq_rel) + 1 < kTile / tile)
                continue;
            for (int64_t place = expert.first; place < expert.first + expert.count; place++)
                quantise_tile(p, p.hidden + place * width + block * kTile, place, block * kTile);
        }
    });
}

// Calls fn(r0, num_rows) for tiles [begin, end) of the down matrices' rows.
template <class Fn>
void for_tiles(const ExpertsProblem& p, int tile, int64_t begin, int64_t end, Fn&& fn) {
    for (int64_t i = begin; i < end; i++) fn(i * tile, static_cast<int>(std::min<int64_t>(tile, p.down.rows - i * tile)));
}

// Few rows: a tile of all experts and its sums by one thread, in one loop.
void down_by_tile(Pool& pool, const ExpertsProblem& p, int num_rows) {
    const int tile = tile_rows(p.down.rows, num_rows, pool.num_active());
    const auto compute = [&](int64_t r0, int height) {
        for (int64_t i = 0; i < *p.routed.num_experts; i++) down(p, p.routed.experts[i], r0, height);
        for (int64_t row = 0; row < num_rows; row++) combine(p, row, r0, height);
    };
    pool.parallel_for(num_tiles(p.down.rows, tile), [&](int64_t begin, int64_t end) { for_tiles(p, tile, begin, end, compute); });
}

// Many rows: expert by expert, so that an expert's input rows stay in the cache for all its tiles.
void down_by_expert(Pool& pool, const ExpertsProblem& p) {
    const int64_t tiles = num_tiles(p.down.rows, kTile);
    pool.parallel_for(*p.routed.num_experts * tiles, [&](int64_t begin, int64_t end) {
        for (int64_t item = begin; item < end; item++)
            for_tiles(p, kTile, item % tiles, item % tiles + 1,
                      [&](int64_t r0, int num_rows) { down(p, p.routed.experts[item / tiles], r0, num_rows); });
    });
}

}  // namespace

void experts(Pool& pool, const ExpertsProblem& p, const Window& window) {
    const bool asks = p.linked && *p.routed.num_linked > 0;
    if (asks) p.linked->ask(p);
    hidden_rows(pool, p);
    if (asks) p.linked->collect(p);
    if (window.num_rows <= kFewRows) {
        down_by_tile(pool, p, window.num_rows);
        return;
    }
    down_by_expert(pool, p);
    pool.parallel_for(window.num_rows, 1, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++)
            for_tiles(p, kTile, 0, num_tiles(p.down.rows, kTile), [&](int64_t r0, int num_rows) { combine(p, row, r0, num_rows); });
    });
}

void expert_rows(Pool& pool, const ExpertsProblem& p) {
    hidden_rows(pool, p);
    down_by_expert(pool, p);
}

}  // namespace tandem
