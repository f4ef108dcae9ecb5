// 2.3125 bits: eight weights by one of 512 patterns, signs by seven bits.
#pragma once
#include "quant/block32.h"
#include "quant/grid.h"

namespace tandem::quant {

struct IQ2_XS {
    static constexpr int block_values = 256;
    static constexpr bool has_minima = false;

    struct Block {
        uint8_t d[2];       // f16
        uint8_t qs[64];     // 32 x u16: nine bits of pattern, seven of signs
        uint8_t scales[8];  // of 16 weights each: a nibble
    };
    static_assert(sizeof(Block) == 74);

    // The 32 weights from 32 * j on.
    TANDEM_HD static Block32 decode(const Block& b, int j) {
        Block32 out;
        out.d = load_f16(b.d) * 0.125f;
        for (int h = 0; h < 2; h++) out.scale[h] = 2 * nibble(b.scales, 2 * j + h) + 1;
        for (int i = 0; i < 32; i++) {
            const uint16_t q = load_u16(b.qs + 8 * j + 2 * (i / 8));
            out.w[i] = static_cast<int8_t>(signed_by(signs_of_seven(q >> 9), i % 8, iq2_level(kGridIq2Xs[q & 511], i % 8)));
        }
        return out;
    }
    TANDEM_HD static bool finite(const Block& b) { return finite_f16(b.d); }
};

}  // namespace tandem::quant
