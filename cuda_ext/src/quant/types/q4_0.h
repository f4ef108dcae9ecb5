// 4.5 bits: a scale and 32 nibbles around 8.
#pragma once
#include "quant/block32.h"

namespace tandem::quant {

struct Q4_0 {
    static constexpr int block_values = 32;
    static constexpr bool has_minima = false;

    struct Block {
        uint8_t d[2];    // f16
        uint8_t qs[16];  // nibbles: weights 0..15 low, 16..31 high
    };
    static_assert(sizeof(Block) == 18);

    // The 32 weights of the block.
    TANDEM_HD static Block32 decode(const Block& b, int) {
        Block32 out;
        out.d = load_f16(b.d);
        for (int i = 0; i < 32; i++) out.w[i] = static_cast<int8_t>(split_nibble(b.qs, i) - 8);
        return out;
    }
    TANDEM_HD static bool finite(const Block& b) { return finite_f16(b.d); }
};

}  // namespace tandem::quant
