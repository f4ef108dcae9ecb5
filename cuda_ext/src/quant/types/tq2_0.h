// 2.0625 bits: ternary weights in two bits each.
#pragma once
#include "quant/block32.h"

namespace tandem::quant {

struct TQ2_0 {
    static constexpr int block_values = 256;
    static constexpr bool has_minima = false;

    struct Block {
        uint8_t qs[64];  // two-bit field j % 4 of bytes 32 * (j / 4) .. + 31: weights of block j
        uint8_t d[2];    // f16
    };
    static_assert(sizeof(Block) == 66);

    // The 32 weights from 32 * j on.
    TANDEM_HD static Block32 decode(const Block& b, int j) {
        Block32 out;
        out.d = load_f16(b.d);
        const uint8_t* qs = b.qs + 32 * (j / 4);
        for (int i = 0; i < 32; i++) out.w[i] = static_cast<int8_t>(((qs[i] >> 2 * (j % 4)) & 3) - 1);
        return out;
    }
    TANDEM_HD static bool finite(const Block& b) { return finite_f16(b.d); }
};

}  // namespace tandem::quant
