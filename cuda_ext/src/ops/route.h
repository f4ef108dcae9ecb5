// Chooses the experts of every row and sorts the pairs by expert.
//
// Order: the top_k greatest scores (ops/router_sum.h), descending, ties by lower id. logit = score / rms. Softmax: e = exp(logit -
// that of the first chosen), weight = e / sum8(e) over all experts, or where it is renormalised e alone; sigmoid: weight = 1 / (1 +
// exp(-logit)). Renormalised: divided by the sum over the routed list, first to last. Then times `scale`.
#pragma once
#include "cache/expert_table.h"
#include "ops/gating.h"
#include "ops/routed.h"
#include "ops/router_sum.h"
#include "ops/vector.h"
#include "ops/window.h"

namespace tandem {

constexpr int kMaxExperts = 4096;  // of a layer

struct RouteProblem {
    const int64_t* sums;   // [rows, experts], ops/router.h
    const float* inverse;  // [rows] 1 / rms
    int num_experts;       // at most kMaxExperts
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
