// 3.4375 bits: 16 signed scales of six bits under one f16.
#pragma once
#include "quant/block32.h"

namespace tandem::quant {

struct Q3_K {
    static constexpr int block_values = 256;
    static constexpr bool has_minima = false;

    struct Block {
        uint8_t hmask[32];   // bit j of byte i: weight i of block j is not lowered by 4
        uint8_t qs[64];      // two-bit field j % 4 of bytes 32 * (j / 4) .. + 31: weights of block j
        uint8_t scales[12];  // low nibbles of scales 0..7 and 8..15, then four two-bit upper parts a byte
        uint8_t d[2];        // f16
    };
    static_assert(sizeof(Block) == 110);

    // The 32 weights from 32 * j on.
    TANDEM_HD static Block32 decode(const Block& b, int j) {
        Block32 out;
        out.d = load_f16(b.d);
        for (int h = 0; h < 2; h++) out.scale[h] = scale(b, 2 * j + h);
        const uint8_t* qs = b.qs + 32 * (j / 4);
        for (int i = 0; i < 32; i++) out.w[i] = static_cast<int8_t>(((qs[i] >> 2 * (j % 4)) & 3) - ((b.hmask[i] >> j) & 1 ? 0 : 4));
        return out;
    }
    TANDEM_HD static bool finite(const Block& b) { return finite_f16(b.d); }

    TANDEM_HD static int scale(const Block& b, int g) {
        const int low = g < 8 ? low_nibble(b.scales[g]) : high_nibble(b.scales[g - 8]);
        return (low | ((b.scales[8 + g % 4] >> 2 * (g / 4)) & 3) << 4) - 32;
    }
};

}  // namespace tandem::quant
