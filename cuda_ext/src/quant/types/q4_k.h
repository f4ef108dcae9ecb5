// 4.5 bits: 8 scales and minima of six bits under two f16.
#pragma once
#include "quant/block32.h"
#include "quant/types/k_scale.h"

namespace tandem::quant {

struct Q4_K {
    static constexpr int block_values = 256;
    static constexpr bool has_minima = true;

    struct Block {
        uint8_t d[2];        // f16
        uint8_t m[2];        // f16, subtracted
        uint8_t scales[12];  // see k_scale.h
        uint8_t qs[128];     // nibble j % 2 of bytes 32 * (j / 2) .. + 31: weights of block j
    };
    static_assert(sizeof(Block) == 144);

    // The 32 weights from 32 * j on.
    TANDEM_HD static Block32 decode(const Block& b, int j) {
        Block32 out;
        out.d = load_f16(b.d);
        out.m = -load_f16(b.m);
        const auto [scale, minimum] = k_scale(b.scales, j);
        for (int h = 0; h < 2; h++) {
            out.scale[h] = scale;
            out.minimum[h] = minimum;
        }
        const uint8_t* qs = b.qs + 32 * (j / 2);
        for (int i = 0; i < 32; i++) out.w[i] = static_cast<int8_t>((qs[i] >> 4 * (j % 2)) & 15);
        return out;
    }
    TANDEM_HD static bool finite(const Block& b) { return finite_f16(b.d) && finite_f16(b.m); }
};

}  // namespace tandem::quant
