// 1.6875 bits: ternary weights, five to a byte in base 3.
#pragma once
#include "quant/block32.h"

namespace tandem::quant {

struct TQ1_0 {
    static constexpr int block_values = 256;
    static constexpr bool has_minima = false;

    struct Block {
        uint8_t qs[48];  // weights 0..159: digit p of byte i is weight 32 p + i; 160..239: of byte 32 + i, 160 + 16 p + i
        uint8_t qh[4];   // weights 240..255: digit p of byte i is weight 240 + 4 p + i
        uint8_t d[2];    // f16
    };
    static_assert(sizeof(Block) == 54);

    // The 32 weights from 32 * j on.
    TANDEM_HD static Block32 decode(const Block& b, int j) {
        Block32 out;
        out.d = load_f16(b.d);
        for (int i = 0; i < 32; i++) out.w[i] = static_cast<int8_t>(trit(b, 32 * j + i) - 1);
        return out;
    }
    TANDEM_HD static bool finite(const Block& b) { return finite_f16(b.d); }

    // The bytes are fractions: a digit is the integer part of three times the rest.
    TANDEM_HD static int trit(const Block& b, int i) {
        constexpr uint8_t power[5] = {1, 3, 9, 27, 81};
        const uint8_t byte = i < 160 ? b.qs[i % 32] : i < 240 ? b.qs[32 + i % 16] : b.qh[i % 4];
        const int digit = i < 160 ? i / 32 : i < 240 ? (i - 160) / 16 : (i - 240) / 4;
        return static_cast<uint8_t>(byte * power[digit]) * 3 >> 8;
    }
};

}  // namespace tandem::quant
