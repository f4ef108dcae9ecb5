// 3.4375 bits: four weights by one of 512 patterns, a sign bit each.
#pragma once
#include "quant/block32.h"
#include "quant/grid.h"

namespace tandem::quant {

struct IQ3_S {
    static constexpr int block_values = 256;
    static constexpr bool has_minima = false;

    struct Block {
        uint8_t d[2];       // f16
        uint8_t qs[64];     // lower bits of the pattern numbers
        uint8_t qh[8];      // bit k: ninth bit of a block's pattern k
        uint8_t signs[32];  // bit i: weight i is negative
        uint8_t scales[4];  // of a block: a nibble
    };
    static_assert(sizeof(Block) == 110);

    // The 32 weights from 32 * j on.
    TANDEM_HD static Block32 decode(const Block& b, int j) {
        Block32 out;
        out.d = load_f16(b.d);
        out.scale[0] = out.scale[1] = 2 * nibble(b.scales, j) + 1;
        for (int i = 0; i < 32; i++) {
            const int k = i / 4, pattern = b.qs[8 * j + k] | ((b.qh[j] >> k) & 1) << 8;
            out.w[i] = static_cast<int8_t>(signed_by(b.signs[4 * j + i / 8], i % 8, iq3_s_level(kGridIq3S[pattern], i % 4)));
        }
        return out;
    }
    TANDEM_HD static bool finite(const Block& b) { return finite_f16(b.d); }
};

}  // namespace tandem::quant
