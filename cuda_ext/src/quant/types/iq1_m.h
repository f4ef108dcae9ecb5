// 1.75 bits: eight ternary weights by one of 2,048 patterns, each eight moved up or down by an eighth.
#pragma once
#include "quant/block32.h"
#include "quant/grid.h"

namespace tandem::quant {

struct IQ1_M {
    static constexpr int block_values = 256;
    static constexpr bool has_minima = false;

    struct Block {
        uint8_t qs[32];     // lower bits of the pattern numbers
        uint8_t qh[16];     // per pattern a nibble: three upper bits and the direction
        uint8_t scales[8];  // 4 x u16: four three-bit scales of 16 weights, and a quarter of the f16 scale on top
    };
    static_assert(sizeof(Block) == 56);

    // The 32 weights from 32 * j on.
    TANDEM_HD static Block32 decode(const Block& b, int j) {
        Block32 out;
        out.d = f16_float(d_bits(b)) * 0.125f;
        for (int h = 0; h < 2; h++) out.scale[h] = 2 * ((load_u16(b.scales + 2 * (j / 2)) >> 3 * (2 * (j % 2) + h)) & 7) + 1;
        for (int i = 0; i < 32; i++) {
            const int k = 4 * j + i / 8, high = nibble(b.qh, k), pattern = b.qs[k] | (high & 7) << 8;
            out.w[i] = static_cast<int8_t>(8 * iq1_level(kGridIq1[pattern], i % 8) + (high & 8 ? -1 : 1));
        }
        return out;
    }
    TANDEM_HD static bool finite(const Block& b) { return f16_finite(d_bits(b)); }

    TANDEM_HD static uint16_t d_bits(const Block& b) {
        return static_cast<uint16_t>(high_nibble(b.scales[1]) | high_nibble(b.scales[3]) << 4 | high_nibble(b.scales[5]) << 8 |
                                     high_nibble(b.scales[7]) << 12);
    }
};

}  // namespace tandem::quant
