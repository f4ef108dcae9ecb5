// IEEE single precision.
#pragma once
#include "quant/scalar.h"

namespace tandem::quant {

struct F32 {
    static constexpr int block_values = 1;

    struct Block {
        uint8_t bits[4];
    };
    static_assert(sizeof(Block) == 4);

    TANDEM_HD static float value(const Block& b) { return bits_float(load_u32(b.bits)); }
    TANDEM_HD static bool finite(const Block& b) { return (load_u32(b.bits) & 0x7f800000u) != 0x7f800000u; }
};

}  // namespace tandem::quant
