#include "ops/matmul.h"

#include <algorithm>

#include "ops/tiles.h"

namespace tandem {

namespace {

constexpr int kInputRows = 64;  // input rows of one kernel call

void add_residual(const MatmulPart& part, const float* tile, int64_t first_row, int num_x, int64_t r0, int num_rows) {
    for (int x = 0; x < num_x; x++) {
        const int64_t at = (first_row + x) * part.weights.rows + r0;
        for (int r = 0; r < num_rows; r++) part.out[at + r] = part.residual[at + r] + tile[x * kTile + r];
    }
}

void compute_rows(const MatmulProblem& p, const MatmulPart& part, int64_t r0, int num_rows, int num_inputs) {
    const Weights& w = part.weights;
    quant::ActRow x[kInputRows];
    alignas(64) float tile[kInputRows * kTile];
    for (int first = 0; first < num_inputs; first += kInputRows) {
        const int num_x = std::min(kInputRows, num_inputs - first);
        for (int i = 0; i < num_x; i++) x[i] = p.x.row(first + i);
        if (part.residual) {
            p.kernels->dot(w.type, w.row(r0), w.row_bytes, num_rows, w.columns, x, num_x, tile, kTile);
            add_residual(part, tile, first, num_x, r0, num_rows);
        } else {
            p.kernels->dot(w.type, w.row(r0), w.row_bytes, num_rows, w.columns, x, num_x, part.out + first * w.rows + r0, w.rows);
        }
    }
}

}  // namespace

void matmul(Pool& pool, const MatmulProblem& p, const Window& window) {
    const int num_inputs = span_of(window, p.rows).count;
    if (num_inputs == 0) return;
    int64_t num_rows = 0, num_items = 0;
    for (const MatmulPart& part : p.parts) num_rows += part.weights.rows;
    const int tile = tile_rows(num_rows, num_inputs, pool.num_active());
    for (const MatmulPart& part : p.parts) num_items += num_tiles(part.weights.rows, tile);
    pool.parallel_for(num_items, [&](int64_t begin, int64_t end) {
        for (int64_t item = begin; item < end; item++) {
            int64_t index = item;
            const MatmulPart* part = p.parts.data();
            for (; index >= num_tiles(part->weights.rows, tile); part++) index -= num_tiles(part->weights.rows, tile);
            const int64_t r0 = index * tile;
            compute_rows(p, *part, r0, static_cast<int>(std::min<int64_t>(tile, part->weights.rows - r0)), num_inputs);
        }
    });
}

}  // namespace tandem
