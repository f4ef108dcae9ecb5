// The routed experts of a layer: out[row] += sum over the row's list of weight * down(silu(gate(x)) * up(x)).
//
// Order: dot products as the types define them; silu(g) * u by the row kernels, quantised again for a quantised down matrix;
// then, per row, sum = fmaf(weight, y, sum) from +0 in the order of the routed list, and out = out + sum.
// Where an expert's bytes lie does not matter, nor which rows use it in the same run.
#pragma once
#include "ops/activations.h"
#include "ops/linked_rows.h"
#include "ops/routed.h"
#include "ops/vector.h"
#include "ops/window.h"

namespace tandem {

// One matrix inside a blob.
struct BlobMatrix {
    quant::Type type;
    size_t offset;
    int64_t rows;
    int64_t columns;
    size_t row_bytes;

    const uint8_t* row(const uint8_t* blob, int64_t index) const { return blob + offset + index * row_bytes; }
};

struct ExpertsProblem {
    BlobMatrix gate;  // [width, hidden]
    BlobMatrix up;
    BlobMatrix down;  // [hidden, width]
    Routed routed;
    Activations x;                   // [rows, hidden]
    float* hidden;                   // [pairs, width] in the order of Routed::order
    quant::ActGroup* hidden_groups;  // the same, quantised; or null where `down` wants floats
    float* expert_rows;              // [pairs, hidden] in that order
    float* out;                      // [rows, hidden]
    const quant::RowKernels* row_kernels;
    const VectorKernels* vector_kernels;
    int layer;
    LinkedRows* linked;  // asked for the rows of the list's linked experts; or null where it has none
};

void experts(Pool& pool, const ExpertsProblem& problem, const Window& window);

// The rows alone: `expert_rows` is filled in the order of Routed::order, nothing is combined. `out`, the
// weights, ids and places of the list are not read.
void expert_rows(Pool& pool, const ExpertsProblem& problem);

}  // namespace tandem
