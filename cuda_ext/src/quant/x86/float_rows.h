// Rows of F32, F16 and BF16 weights: 32 sums in as many registers as they take. `Lanes`: as in tile_dot.h, with values(weights), a
// register full of weights as floats.
#pragma once
#include "quant/types.h"
#include "quant/x86/frame.h"

namespace tandem::quant {
namespace {

// One weight row by `num_x` input rows.
template <class Lanes, class T, int num_x>
TANDEM_INLINE void dot_float_inputs(const Row& row, int first_x) {
    const auto* weights = reinterpret_cast<const typename T::Block*>(row.weights);
    const ActRow* x = row.x + first_x;
    constexpr int num_registers = kBlock / Lanes::kLanes;
    typename Lanes::Float lanes[num_x][num_registers];
    for (auto& sums : lanes)
        for (auto& sum : sums) sum = Lanes::zero();
    const int64_t whole = row.num_values / kBlock * kBlock;
    for (int64_t i = 0; i < whole; i += kBlock)
        for (int k = 0; k < num_registers; k++) {
            const int64_t at = i + Lanes::kLanes * k;
            const auto w = Lanes::values(weights + at);
            for (int n = 0; n < num_x; n++) lanes[n][k] = Lanes::fma(w, Lanes::loose(x[n].values + at), lanes[n][k]);
        }
    for (int n = 0; n < num_x; n++) {
        float sums[kBlock];
        for (int k = 0; k < num_registers; k++) Lanes::store(sums + Lanes::kLanes * k, lanes[n][k]);
        for (int64_t i = whole; i < row.num_values; i++)
            sums[i - whole] = fma(T::value(weights[i]), x[n].values[i], sums[i - whole]);
        row.out[(first_x + n) * row.out_stride] = tree_of_lanes(sums);
    }
}

template <class Lanes, class T>
void dot_float_row(const Row& row) {
    int x = 0;
    for (; x + 2 <= row.num_x; x += 2) dot_float_inputs<Lanes, T, 2>(row, x);
    if (x < row.num_x) dot_float_inputs<Lanes, T, 1>(row, x);
}

}  // namespace
}  // namespace tandem::quant
