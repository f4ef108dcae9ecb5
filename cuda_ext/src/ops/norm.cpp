#include "ops/norm.h"

#include <cmath>

namespace tandem {

namespace {

constexpr int kChains = 32;

// Returns the row's 1 / rms.
float norm_row(const NormProblem& p, const float* x, float* values, quant::ActGroup* groups) {
    const float inverse = inverse_rms(x, p.width, p.eps);
    for (int64_t i = 0; i < p.width; i++) values[i] = x[i] * p.gamma[i];
    if (groups) p.kernels->quantise(values, p.width, inverse, groups);
    for (int64_t i = 0; i < p.width; i++) values[i] *= inverse;
    return inverse;
}

}  // namespace

float inverse_rms(const float* x, int64_t width, float eps) {
    float acc[kChains] = {};
    const int64_t whole = width - width % kChains;
    for (int64_t i = 0; i < whole; i += kChains)
        for (int j = 0; j < kChains; j++) acc[j] += x[i + j] * x[i + j];
    for (int64_t i = whole; i < width; i++) acc[i - whole] += x[i] * x[i];
    for (int half = kChains / 2; half > 0; half /= 2)
        for (int j = 0; j < half; j++) acc[j] += acc[j + half];
    return 1.0f / std::sqrt(acc[0] / static_cast<float>(width) + eps);
}

void norm(Pool& pool, const NormProblem& p, const Window& window) {
    const RowSpan span = span_of(window, p.rows);
    pool.parallel_for(span.count, 1, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            const float inverse = norm_row(p, p.x + (span.first + row) * p.width, p.values + row * p.width,
                                           p.groups ? p.groups + row * groups_of(p.width) : nullptr);
            if (p.inverse) p.inverse[row] = inverse;
        }
    });
}

void quantise(Pool& pool, const QuantiseProblem& p, const Window& window) {
    pool.parallel_for(window.num_rows, 1, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++)
            p.kernels->quantise(p.x + row * p.width, p.width, 1.0f, p.groups + row * groups_of(p.width));
    });
}

}  // namespace tandem
