#include "ops/embed.h"

namespace tandem {

void embed(Pool& pool, const EmbedProblem& p, const Window& window) {
    pool.parallel_for(window.num_rows, 1, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++)
            quant::dequantise(p.table.type, p.table.row(window.tokens[row]), p.table.columns, p.out + row * p.table.columns);
    });
}

}  // namespace tandem
