// 1.5625 bits: eight ternary weights by one of 2,048 patterns, all of a block moved up or down by an eighth.
#pragma once
#include "quant/block32.h"
#include "quant/grid.h"

namespace tandem::quant {

struct IQ1_S {
    static constexpr int block_values = 256;
    static constexpr bool has_minima = false;

    struct Block {
        uint8_t d[2];    // f16
        uint8_t qs[32];  // lower bits of the pattern numbers
        uint8_t qh[16];  // per block a u16: 4 x 3 upper bits, a three-bit scale, the direction
    };
    static_assert(sizeof(Block) == 50);

    // The 32 weights from 32 * j on.
    TANDEM_HD static Block32 decode(const Block& b, int j) {
        Block32 out;
        out.d = load_f16(b.d) * 0.125f;
        const uint16_t qh = load_u16(b.qh + 2 * j);
        out.scale[0] = out.scale[1] = 2 * ((qh >> 12) & 7) + 1;
        const int delta = qh & 0x8000 ? -1 : 1;
        for (int i = 0; i < 32; i++) {
            const int k = i / 8, pattern = b.qs[4 * j + k] | ((qh >> 3 * k) & 7) << 8;
            out.w[i] = static_cast<int8_t>(8 * iq1_level(kGridIq1[pattern], i % 8) + delta);
        }
        return out;
    }
    TANDEM_HD static bool finite(const Block& b) { return finite_f16(b.d); }
};

}  // namespace tandem::quant
