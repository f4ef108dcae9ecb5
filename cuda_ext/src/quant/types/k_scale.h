// The twelve bytes of Q4_K and Q5_K that hold eight scales and eight minima of six bits.
//
//   bytes 0..3: scales 0..3, above them the upper two bits of scales 4..7
//   bytes 4..7: minima 0..3, above them the upper two bits of minima 4..7
//   bytes 8..11: lower four bits of scale and minimum 4..7
#pragma once
#include "quant/scalar.h"

namespace tandem::quant {

struct KScale {
    int scale, minimum;
};

TANDEM_HD KScale k_scale(const uint8_t* p, int j) {
    if (j < 4) return {p[j] & 63, p[j + 4] & 63};
    return {(p[j + 4] & 15) | (p[j - 4] >> 6) << 4, (p[j + 4] >> 4) | (p[j] >> 6) << 4};
}

}  // namespace tandem::quant
