// 4.25 bits: the levels of IQ4_NL with 8 signed scales of six bits under one f16.
#pragma once
#include "quant/block32.h"
#include "quant/types/levels.h"

namespace tandem::quant {

struct IQ4_XS {
    static constexpr int block_values = 256;
    static constexpr bool has_minima = false;

    struct Block {
        uint8_t d[2];         // f16
        uint8_t scales_h[2];  // two upper bits of each scale
        uint8_t scales_l[4];  // four lower bits of each scale
        uint8_t qs[128];      // per block 16 bytes, nibbles: weights 0..15 low, 16..31 high
    };
    static_assert(sizeof(Block) == 136);

    // The 32 weights from 32 * j on.
    TANDEM_HD static Block32 decode(const Block& b, int j) {
        Block32 out;
        out.d = load_f16(b.d);
        out.scale[0] = out.scale[1] = (nibble(b.scales_l, j) | ((load_u16(b.scales_h) >> 2 * j) & 3) << 4) - 32;
        for (int i = 0; i < 32; i++) out.w[i] = static_cast<int8_t>(kLevelsIq4[split_nibble(b.qs + 16 * j, i)]);
        return out;
    }
    TANDEM_HD static bool finite(const Block& b) { return finite_f16(b.d); }
};

}  // namespace tandem::quant
