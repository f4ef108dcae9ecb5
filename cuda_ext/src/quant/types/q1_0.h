// 1.125 bits: a scale and 128 signs.
#pragma once
#include "quant/block32.h"

namespace tandem::quant {

struct Q1_0 {
    static constexpr int block_values = 128;
    static constexpr bool has_minima = false;

    struct Block {
        uint8_t d[2];    // f16
        uint8_t qs[16];  // bit i: weight i is +1, else -1
    };
    static_assert(sizeof(Block) == 18);

    // The 32 weights from 32 * j on.
    TANDEM_HD static Block32 decode(const Block& b, int j) {
        Block32 out;
        out.d = load_f16(b.d);
        for (int i = 0; i < 32; i++) out.w[i] = static_cast<int8_t>(2 * bit(b.qs, 32 * j + i) - 1);
        return out;
    }
    TANDEM_HD static bool finite(const Block& b) { return finite_f16(b.d); }
};

}  // namespace tandem::quant
