// 5 bits: a scale, a minimum and 32 nibbles.
#pragma once
#include "quant/block32.h"

namespace tandem::quant {

struct Q4_1 {
    static constexpr int block_values = 32;
    static constexpr bool has_minima = true;

    struct Block {
        uint8_t d[2];    // f16
        uint8_t m[2];    // f16, added
        uint8_t qs[16];  // nibbles: weights 0..15 low, 16..31 high
    };
    static_assert(sizeof(Block) == 20);

    // The 32 weights of the block.
    TANDEM_HD static Block32 decode(const Block& b, int) {
        Block32 out;
        out.d = load_f16(b.d);
        out.m = load_f16(b.m);
        for (int i = 0; i < 32; i++) out.w[i] = static_cast<int8_t>(split_nibble(b.qs, i));
        return out;
    }
    TANDEM_HD static bool finite(const Block& b) { return finite_f16(b.d) && finite_f16(b.m); }
};

}  // namespace tandem::quant
