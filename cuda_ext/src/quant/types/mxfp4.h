// 4.25 bits: OCP microscaling, 32 E2M1 weights (doubled) under a power of two.
#pragma once
#include "quant/block32.h"
#include "quant/types/levels.h"

namespace tandem::quant {

struct MXFP4 {
    static constexpr int block_values = 32;
    static constexpr bool has_minima = false;

    struct Block {
        uint8_t e;       // E8M0
        uint8_t qs[16];  // nibbles: weights 0..15 low, 16..31 high
    };
    static_assert(sizeof(Block) == 17);

    // The 32 weights of the block.
    TANDEM_HD static Block32 decode(const Block& b, int) {
        Block32 out;
        out.d = e8m0_half_float(b.e);
        for (int i = 0; i < 32; i++) out.w[i] = static_cast<int8_t>(kLevelsFp4[split_nibble(b.qs, i)]);
        return out;
    }
    TANDEM_HD static bool finite(const Block& b) { return b.e != 255; }
};

}  // namespace tandem::quant
