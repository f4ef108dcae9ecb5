// Chooses the experts of every row and sorts the pairs by expert.
//
// Order: the top_k greatest logits, descending, ties by lower id. Softmax: e = exp(logit - max), weight = e / sum8(e) over all
// experts; sigmoid: weight = 1 / (1 + exp(-logit)). Renormalised: divided by the sum over the routed list, first to last.
// Then times `scale`.
#pragma once
#include "cache/expert_table.h"
#include "ops/gating.h"
#include "ops/routed.h"
#include "ops/vector.h"
#include "ops/window.h"

namespace tandem {

struct RouteProblem {
    float* logits;  // [rows, experts]; overwritten
    int num_experts;
    Gating gating;
    bool renormalise;
    float scale;
    ExpertTable* table;
    int layer;
    Routed routed;
    const VectorKernels* kernels;
};

void route(Pool& pool, const RouteProblem& problem, const Window& window);

}  // namespace tandem
