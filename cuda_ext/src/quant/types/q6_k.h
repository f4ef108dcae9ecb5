// 6.5625 bits: 16 signed scales of eight bits under one f16; weights around 32.
#pragma once
#include "quant/block32.h"

namespace tandem::quant {

struct Q6_K {
    static constexpr int block_values = 256;
    static constexpr bool has_minima = false;

    struct Block {
        uint8_t ql[128];  // lower nibbles: 64 bytes per 128 weights, blocks 0, 1 low and 2, 3 high
        uint8_t qh[64];   // upper two bits: 32 bytes per 128 weights, field j % 4 for block j
        int8_t scales[16];
        uint8_t d[2];  // f16
    };
    static_assert(sizeof(Block) == 210);

    // The 32 weights from 32 * j on.
    TANDEM_HD static Block32 decode(const Block& b, int j) {
        Block32 out;
        out.d = load_f16(b.d);
        for (int h = 0; h < 2; h++) out.scale[h] = b.scales[2 * j + h];
        const uint8_t* ql = b.ql + 64 * (j / 4) + 32 * (j % 2);
        const uint8_t* qh = b.qh + 32 * (j / 4);
        const int high = 4 * (j % 4 / 2);
        for (int i = 0; i < 32; i++)
            out.w[i] = static_cast<int8_t>((((ql[i] >> high) & 15) | ((qh[i] >> 2 * (j % 4)) & 3) << 4) - 32);
        return out;
    }
    TANDEM_HD static bool finite(const Block& b) { return finite_f16(b.d); }
};

}  // namespace tandem::quant
