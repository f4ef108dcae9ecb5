// 2.5625 bits: eight weights by one of 1,024 patterns, a sign bit each.
#pragma once
#include "quant/block32.h"
#include "quant/grid.h"

namespace tandem::quant {

struct IQ2_S {
    static constexpr int block_values = 256;
    static constexpr bool has_minima = false;

    struct Block {
        uint8_t d[2];       // f16
        uint8_t qs[32];     // lower bits of the pattern numbers
        uint8_t signs[32];  // bit i: weight i is negative
        uint8_t qh[8];      // two upper bits for each of a block's four patterns
        uint8_t scales[8];  // of 16 weights each: a nibble
    };
    static_assert(sizeof(Block) == 82);

    // The 32 weights from 32 * j on.
    TANDEM_HD static Block32 decode(const Block& b, int j) {
        Block32 out;
        out.d = load_f16(b.d) * 0.125f;
        for (int h = 0; h < 2; h++) out.scale[h] = 2 * nibble(b.scales, 2 * j + h) + 1;
        for (int i = 0; i < 32; i++) {
            const int k = i / 8, pattern = b.qs[4 * j + k] | ((b.qh[j] >> 2 * k) & 3) << 8;
            out.w[i] = static_cast<int8_t>(signed_by(b.signs[4 * j + k], i % 8, iq2_level(kGridIq2S[pattern], i % 8)));
        }
        return out;
    }
    TANDEM_HD static bool finite(const Block& b) { return finite_f16(b.d); }
};

}  // namespace tandem::quant
