// out[row] = the embedding of the row's token, exactly as its type defines it.
#pragma once
#include "ops/activations.h"
#include "ops/window.h"

namespace tandem {

struct EmbedProblem {
    Weights table;  // [vocab, width]
    float* out;     // [rows, width]
};

void embed(Pool& pool, const EmbedProblem& problem, const Window& window);

}  // namespace tandem
