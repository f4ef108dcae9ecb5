// Rows of activations in half precision, for the tensor cores.
//
// A row's values are multiplied by a power of two that puts the largest one into [2^14, 2^15): exact, so a row of large values
// does not overflow, and values down to 2^-28 of the largest keep all eleven bits. `scale` undoes it.
#pragma once
#include <cstdint>

#include "quant/arithmetic.h"

namespace tandem::cuda {

// value = scale[row] * half. Memory of a card.
struct HalfRows {
    uint16_t* values;  // [rows, width] IEEE half precision, 16-byte aligned
    float* scale;      // [rows] powers of two; 0 for a zero row, NaN where a value is not finite
    int32_t width;     // a multiple of 32
};

struct HalfScale {
    float scale;
    float inverse;  // multiplies the values
};

// `amax`: bits of the largest magnitude of a row. As in canonical quantisation, a row below 2^-100 is zero.
TANDEM_HD HalfScale half_scale(uint32_t amax) {
    constexpr uint32_t kTop = 14, kBias = 127;
    if (amax < quant::kTiny) return {0.0f, 0.0f};
    if (amax >= quant::kInfinity) return {quant::bits_float(quant::kNan), 0.0f};
    const uint32_t exponent = amax >> 23;
    return {quant::bits_float((exponent - kTop) << 23), quant::bits_float((2 * kBias + kTop - exponent) << 23)};
}

}  // namespace tandem::cuda
