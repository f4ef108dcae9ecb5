// IEEE half precision.
#pragma once
#include "quant/scalar.h"

namespace tandem::quant {

struct F16 {
    static constexpr int block_values = 1;

    struct Block {
        uint8_t bits[2];
    };
    static_assert(sizeof(Block) == 2);

    TANDEM_HD static float value(const Block& b) { return load_f16(b.bits); }
    TANDEM_HD static bool finite(const Block& b) { return finite_f16(b.bits); }
};

}  // namespace tandem::quant
