#include "ops/embed.h"

namespace tandem {

void embed(Worker& worker, const EmbedProblem& p, const Window& window) {
    worker.parallel_for(window.num_rows, 1, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++)
            quant::dequantise(p.table.type, p.table.row(window.tokens[row]), p.table.columns, p.out + row * p.table.columns);
    });
}

}  // namespace tandem
