// 2.0625 bits: eight weights by one of 256 patterns, signs by seven bits.
#pragma once
#include "quant/block32.h"
#include "quant/grid.h"

namespace tandem::quant {

struct IQ2_XXS {
    static constexpr int block_values = 256;
    static constexpr bool has_minima = false;

    struct Block {
        uint8_t d[2];    // f16
        uint8_t qs[64];  // per block: four pattern numbers, then 4 x 7 sign bits and a four-bit scale
    };
    static_assert(sizeof(Block) == 66);

    // The 32 weights from 32 * j on.
    TANDEM_HD static Block32 decode(const Block& b, int j) {
        Block32 out;
        out.d = load_f16(b.d) * 0.125f;
        const uint8_t* qs = b.qs + 8 * j;
        const uint32_t signs = load_u32(qs + 4);
        out.scale[0] = out.scale[1] = static_cast<int>(2 * (signs >> 28) + 1);
        for (int i = 0; i < 32; i++) {
            const uint32_t eight = signs_of_seven((signs >> 7 * (i / 8)) & 127);
            out.w[i] = static_cast<int8_t>(signed_by(eight, i % 8, iq2_level(kGridIq2Xxs[qs[i / 8]], i % 8)));
        }
        return out;
    }
    TANDEM_HD static bool finite(const Block& b) { return finite_f16(b.d); }
};

}  // namespace tandem::quant
