// Rows of F32, F16 and BF16 weights: 32 sums in four registers.
#pragma once
#include "quant/types.h"
#include "quant/x86/frame.h"

namespace tandem::quant {
namespace {

TANDEM_INLINE __m256 eight_values(const F32::Block* p) {
    return _mm256_loadu_ps(reinterpret_cast<const float*>(p));
}
TANDEM_INLINE __m256 eight_values(const F16::Block* p) {
    return _mm256_cvtph_ps(load128(p));
}
TANDEM_INLINE __m256 eight_values(const BF16::Block* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load128(p)), 16));
}

// One weight row by `num_x` input rows.
template <class T, int num_x>
TANDEM_INLINE void dot_float_inputs(const Row& row, int first_x) {
    const auto* weights = reinterpret_cast<const typename T::Block*>(row.weights);
    const ActRow* x = row.x + first_x;
    __m256 lanes[num_x][4];
    for (auto& sums : lanes)
        for (__m256& sum : sums) sum = _mm256_setzero_ps();
    const int64_t whole = row.num_values / kBlock * kBlock;
    for (int64_t i = 0; i < whole; i += kBlock)
        for (int k = 0; k < 4; k++) {
            const __m256 w = eight_values(weights + i + 8 * k);
            for (int n = 0; n < num_x; n++) lanes[n][k] = _mm256_fmadd_ps(w, _mm256_loadu_ps(x[n].values + i + 8 * k), lanes[n][k]);
        }
    for (int n = 0; n < num_x; n++) {
        alignas(32) float sums[kBlock];
        for (int k = 0; k < 4; k++) _mm256_store_ps(sums + 8 * k, lanes[n][k]);
        for (int64_t i = whole; i < row.num_values; i++)
            sums[i - whole] = fma(T::value(weights[i]), x[n].values[i], sums[i - whole]);
        row.out[(first_x + n) * row.out_stride] = tree_of_lanes(sums);
    }
}

template <class T>
void dot_float_row(const Row& row) {
    int x = 0;
    for (; x + 2 <= row.num_x; x += 2) dot_float_inputs<T, 2>(row, x);
    if (x < row.num_x) dot_float_inputs<T, 1>(row, x);
}

}  // namespace
}  // namespace tandem::quant
