// How much a router wants each expert for each row: sums in fixed point, before the norm's factor (ops/router_sum.h).
#pragma once
#include "ops/router_sum.h"
#include "ops/vector.h"
#include "ops/window.h"

namespace tandem {

struct RouterProblem {
    const float* x;        // [rows, width]
    const float* gamma;    // [width]
    const float* weights;  // [width, experts]
    int64_t width;         // at most kMaxRouterWidth
    int num_experts;
    int64_t* sums;  // [rows, experts]
    const VectorKernels* kernels;
};

void router(Pool& pool, const RouterProblem& problem, const Window& window);

}  // namespace tandem
