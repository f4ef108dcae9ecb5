// Levels and signs of the IQ types' code books.
#pragma once
#include "quant/grid_data.h"
#include "quant/scalar.h"

namespace tandem::quant {

TANDEM_HD constexpr int iq1_level(uint16_t packed, int i) {
    return ((packed >> 2 * i) & 3) - 1;
}
TANDEM_HD constexpr int iq2_level(uint16_t packed, int i) {  // 8, 25, 43
    const int level = (packed >> 2 * i) & 3;
    return 8 + 17 * level + (level == 2 ? 1 : 0);
}
TANDEM_HD constexpr int iq3_xxs_level(uint16_t packed, int i) {  // 4, 12, ..., 52, 62
    const int level = (packed >> 3 * i) & 7;
    return 4 + 8 * level + (level == 7 ? 2 : 0);
}
TANDEM_HD constexpr int iq3_s_level(uint16_t packed, int i) {
    return 1 + 2 * ((packed >> 3 * i) & 7);
}

// Seven stored sign bits; the eighth makes their number even.
TANDEM_HD uint32_t signs_of_seven(uint32_t seven) {
    uint32_t parity = seven ^ seven >> 4;
    parity ^= parity >> 2;
    parity ^= parity >> 1;
    return seven | (parity & 1) << 7;
}
TANDEM_HD int signed_by(uint32_t signs, int i, int value) {
    return (signs >> i) & 1 ? -value : value;
}

}  // namespace tandem::quant
