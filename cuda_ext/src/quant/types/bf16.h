// bfloat16: the upper half of a single.
#pragma once
#include "quant/scalar.h"

namespace tandem::quant {

struct BF16 {
    static constexpr int block_values = 1;

    struct Block {
        uint8_t bits[2];
    };
    static_assert(sizeof(Block) == 2);

    TANDEM_HD static float value(const Block& b) { return bits_float(static_cast<uint32_t>(load_u16(b.bits)) << 16); }
    TANDEM_HD static bool finite(const Block& b) { return (load_u16(b.bits) & 0x7f80) != 0x7f80; }
};

}  // namespace tandem::quant
