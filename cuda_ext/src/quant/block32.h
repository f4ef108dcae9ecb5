// What every quantised type decodes to, so that one frame serves them all.
#pragma once
#include "quant/scalar.h"

namespace tandem::quant {

// Thirty-two weights of a row. With h = i / 16, weight i is d * scale[h] * w[i] + m * minimum[h].
struct Block32 {
    int8_t w[32];
    float d;
    float m = 0;            // signed; only read where the type has minima
    int scale[2] = {1, 1};  // of the first and the last sixteen weights
    int minimum[2] = {1, 1};
};

TANDEM_HD int low_nibble(uint8_t x) {
    return x & 15;
}
TANDEM_HD int high_nibble(uint8_t x) {
    return x >> 4;
}
// Nibble `index` of packed bytes, low one first.
TANDEM_HD int nibble(const uint8_t* p, int index) {
    return (p[index / 2] >> 4 * (index % 2)) & 15;
}
// Sixteen bytes hold weights 0..15 in their low and 16..31 in their high nibbles.
TANDEM_HD int split_nibble(const uint8_t* p, int i) {
    return (p[i % 16] >> 4 * (i / 16)) & 15;
}
TANDEM_HD int bit(const uint8_t* p, int index) {
    return (p[index / 8] >> index % 8) & 1;
}

}  // namespace tandem::quant
