// 2.25 bits: a scale and 64 two-bit weights -1, 0, 1, 2.
#pragma once
#include "quant/block32.h"

namespace tandem::quant {

struct Q2_0 {
    static constexpr int block_values = 64;
    static constexpr bool has_minima = false;

    struct Block {
        uint8_t d[2];    // f16
        uint8_t qs[16];  // four weights a byte, the first one lowest
    };
    static_assert(sizeof(Block) == 18);

    // The 32 weights from 32 * j on.
    TANDEM_HD static Block32 decode(const Block& b, int j) {
        Block32 out;
        out.d = load_f16(b.d);
        const uint8_t* qs = b.qs + 8 * j;
        for (int i = 0; i < 32; i++) out.w[i] = static_cast<int8_t>(((qs[i / 4] >> 2 * (i % 4)) & 3) - 1);
        return out;
    }
    TANDEM_HD static bool finite(const Block& b) { return finite_f16(b.d); }
};

}  // namespace tandem::quant
