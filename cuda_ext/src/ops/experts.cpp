#include "ops/experts.h"

#include <algorithm>

namespace tandem {

namespace {

constexpr int kTile = 32;       // weight rows of one item
constexpr int kInputRows = 64;  // input rows of one kernel call

void gate_and_up(const ExpertsProblem& p, const ExpertRows& expert, int64_t r0) {
    const int64_t width = p.gate.rows;
    const int num_rows = static_cast<int>(std::min<int64_t>(kTile, width - r0));
    quant::ActRow x[kInputRows];
    alignas(64) float gate[kInputRows * kTile], up[kInputRows * kTile];
    for (int first = 0; first < expert.count; first += kInputRows) {
        const int num_x = std::min(kInputRows, expert.count - first);
        const int32_t* order = p.routed.order + expert.first + first;
        for (int i = 0; i < num_x; i++) x[i] = p.x.row(order[i] / p.routed.top_k);
        for (const auto& [matrix, out] : {std::pair(&p.gate, gate), std::pair(&p.up, up)})
            p.row_kernels->dot(matrix->type, matrix->row(expert.blob, r0), matrix->row_bytes, num_rows, matrix->columns, x, num_x,
                               out, kTile);
        float* hidden = p.hidden + (int64_t{expert.first} + first) * width + r0;
        for (int i = 0; i < num_x; i++) p.row_kernels->swiglu(gate + i * kTile, up + i * kTile, num_rows, hidden + i * width);
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

// From the routed input rows to the rows that `down` takes, in the order of Routed::order.
void hidden_rows(Worker& worker, const ExpertsProblem& p, int64_t num_pairs) {
    const int64_t used = *p.routed.num_experts, tiles = (p.gate.rows + kTile - 1) / kTile;
    worker.parallel_for(used * tiles, [&](int64_t begin, int64_t end) {
        for (int64_t item = begin; item < end; item++) gate_and_up(p, p.routed.experts[item / tiles], item % tiles * kTile);
    });
    worker.barrier();
    if (!p.hidden_groups) return;
    const int64_t width = p.down.columns;
    worker.parallel_for(num_pairs, [&](int64_t begin, int64_t end) {
        for (int64_t place = begin; place < end; place++)
            p.row_kernels->quantise(p.hidden + place * width, width, 1.0f, p.hidden_groups + place * groups_of(width));
    });
    worker.barrier();
}

// Calls fn(r0, num_rows) for every tile of the down matrices' rows, behind the rows of all experts in that tile.
template <class Fn>
void down_tiles(Worker& worker, const ExpertsProblem& p, Fn&& fn) {
    const int64_t tiles = (p.down.rows + kTile - 1) / kTile;
    worker.parallel_for(tiles, [&](int64_t begin, int64_t end) {
        for (int64_t tile = begin; tile < end; tile++) {
            const int64_t r0 = tile * kTile;
            const int num_rows = static_cast<int>(std::min<int64_t>(kTile, p.down.rows - r0));
            for (int64_t i = 0; i < *p.routed.num_experts; i++) down(p, p.routed.experts[i], r0, num_rows);
            fn(r0, num_rows);
        }
    });
}

}  // namespace

void experts(Worker& worker, const ExpertsProblem& p, const Window& window) {
    const bool asks = p.linked && *p.routed.num_linked > 0;
    if (asks && worker.index() == 0) p.linked->ask(p);
    hidden_rows(worker, p, int64_t{window.num_rows} * p.routed.top_k);
    if (asks) worker.barrier([&] { p.linked->collect(p); });
    down_tiles(worker, p, [&](int64_t r0, int num_rows) {
        for (int64_t row = 0; row < window.num_rows; row++) combine(p, row, r0, num_rows);
    });
}

void expert_rows(Worker& worker, const ExpertsProblem& p, int64_t num_pairs) {
    hidden_rows(worker, p, num_pairs);
    down_tiles(worker, p, [](int64_t, int) {});
}

}  // namespace tandem
