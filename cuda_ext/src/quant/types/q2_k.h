// 2.625 bits: 16 scales and minima of four bits under two f16.
#pragma once
#include "quant/block32.h"

namespace tandem::quant {

struct Q2_K {
    static constexpr int block_values = 256;
    static constexpr bool has_minima = true;

    struct Block {
        uint8_t scales[16];  // of 16 weights each: scale low, minimum high nibble
        uint8_t qs[64];      // two-bit field j % 4 of bytes 32 * (j / 4) .. + 31: weights of block j
        uint8_t d[2];        // f16
        uint8_t m[2];        // f16, subtracted
    };
    static_assert(sizeof(Block) == 84);

    // The 32 weights from 32 * j on.
    TANDEM_HD static Block32 decode(const Block& b, int j) {
        Block32 out;
        out.d = load_f16(b.d);
        out.m = -load_f16(b.m);
        for (int h = 0; h < 2; h++) {
            out.scale[h] = low_nibble(b.scales[2 * j + h]);
            out.minimum[h] = high_nibble(b.scales[2 * j + h]);
        }
        const uint8_t* qs = b.qs + 32 * (j / 4);
        for (int i = 0; i < 32; i++) out.w[i] = static_cast<int8_t>((qs[i] >> 2 * (j % 4)) & 3);
        return out;
    }
    TANDEM_HD static bool finite(const Block& b) { return finite_f16(b.d) && finite_f16(b.m); }
};

}  // namespace tandem::quant
