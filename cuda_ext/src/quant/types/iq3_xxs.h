// 3.0625 bits: four weights by one of 256 patterns, signs by seven bits for eight.
#pragma once
#include "quant/block32.h"
#include "quant/grid.h"

namespace tandem::quant {

struct IQ3_XXS {
    static constexpr int block_values = 256;
    static constexpr bool has_minima = false;

    struct Block {
        uint8_t d[2];        // f16
        uint8_t qs[64];      // pattern numbers
        uint8_t scales[32];  // per block a u32: 4 x 7 sign bits and a four-bit scale
    };
    static_assert(sizeof(Block) == 98);

    // The 32 weights from 32 * j on.
    TANDEM_HD static Block32 decode(const Block& b, int j) {
        Block32 out;
        out.d = load_f16(b.d) * 0.25f;
        const uint32_t signs = load_u32(b.scales + 4 * j);
        out.scale[0] = out.scale[1] = static_cast<int>(2 * (signs >> 28) + 1);
        for (int i = 0; i < 32; i++) {
            const uint32_t eight = signs_of_seven((signs >> 7 * (i / 8)) & 127);
            out.w[i] = static_cast<int8_t>(signed_by(eight, i % 8, iq3_xxs_level(kGridIq3Xxs[b.qs[8 * j + i / 4]], i % 4)));
        }
        return out;
    }
    TANDEM_HD static bool finite(const Block& b) { return finite_f16(b.d); }
};

}  // namespace tandem::quant
