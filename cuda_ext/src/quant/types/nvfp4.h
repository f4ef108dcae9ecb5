// 4.5 bits: E2M1 weights (doubled), a scale in unsigned E4M3 for every 16.
#pragma once
#include "quant/block32.h"
#include "quant/types/levels.h"

namespace tandem::quant {

struct NVFP4 {
    static constexpr int block_values = 64;
    static constexpr bool has_minima = false;

    struct Block {
        uint8_t d[4];    // UE4M3
        uint8_t qs[32];  // per 16 weights 8 bytes: weights 0..7 low, 8..15 high nibbles
    };
    static_assert(sizeof(Block) == 36);

    // The 32 weights from 32 * j on.
    TANDEM_HD static Block32 decode(const Block& b, int j) {
        Block32 out;
        out.d = 0x1p-10f;
        for (int h = 0; h < 2; h++) {
            out.scale[h] = ue4m3_units(b.d[2 * j + h]);
            const uint8_t* qs = b.qs + 16 * j + 8 * h;
            for (int i = 0; i < 16; i++) out.w[16 * h + i] = kLevelsFp4[(qs[i % 8] >> 4 * (i / 8)) & 15];
        }
        return out;
    }
    TANDEM_HD static bool finite(const Block& b) {
        return (b.d[0] & 127) != 127 && (b.d[1] & 127) != 127 && (b.d[2] & 127) != 127 && (b.d[3] & 127) != 127;
    }
};

}  // namespace tandem::quant
