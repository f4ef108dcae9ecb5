// The routed experts of a layer for a prompt's chunk, by tensor cores: hidden[row] += sum over the row's list of
// weight * down(silu(gate(x)) * up(x)).
//
// Products as in matmul_prompt.h; silu(g) * u in single precision, rounded to half precision for the down product; then, per
// row, sum = fmaf(weight, y, sum) from +0 in the order of the routed list, and hidden = hidden + sum. Experts may be computed
// list by list as their blobs arrive: a pair's bits depend neither on the list nor on where the blob lies.
#pragma once
#include <cuda_runtime.h>

#include "cuda_ops/half_rows.h"
#include "cuda_ops/route_prompt.h"
#include "quant/row.h"

namespace tandem::cuda {

// One matrix inside every blob.
struct PromptMatrix {
    quant::Type type;
    size_t offset;    // a multiple of 16
    int32_t rows;     // a multiple of 8
    int32_t columns;  // a multiple of 32
    size_t row_bytes;
};

struct ExpertsPromptProblem {
    PromptMatrix gate;  // [width, hidden]
    PromptMatrix up;    // [width, hidden], its type may be another
    PromptMatrix down;  // [hidden, width]
    RoutedPrompt routed;
    HalfRows x;          // [rows, hidden]
    float* products;     // [pairs, width] silu(gate) * up, in the order of RoutedPrompt::order
    HalfRows halves;     // [pairs, width] the same
    float* expert_rows;  // [pairs, hidden] in that order
    float* hidden;       // [rows, hidden]
};

// Rows of `expert_rows` for the experts of a list whose tiles are known. `max_tiles` is at least *list.num_tiles; blocks beyond it
// end at once. Throws std::invalid_argument for matrices that do not fit each other.
void experts_gate_up_prompt(const ExpertsPromptProblem& problem, const ExpertList& list, int max_tiles, cudaStream_t stream);
void experts_down_prompt(const ExpertsPromptProblem& problem, const ExpertList& list, int max_tiles, cudaStream_t stream);

// Once the rows of all pairs are there.
void experts_combine_prompt(const ExpertsPromptProblem& problem, int num_rows, cudaStream_t stream);

}  // namespace tandem::cuda
