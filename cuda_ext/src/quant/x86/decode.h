// A super-block of 256 weights in registers, and how each type gets there.
#pragma once
#include "quant/types.h"
#include "quant/x86/vectors.h"

namespace tandem::quant {
namespace {

// Lane j of the float vectors belongs to block j. A decoder fills what its `weights` say.
struct Super {
    __m256i w[kBlocks];  // 32 weights each: signed, or unsigned and larger by `offset`
    __m256 d;            // scale; without `halves` the integer scale is in it
    __m256 m;            // signed minimum; without `halves` the integer minimum is in it
    __m256 scale[2];     // halves: integer scales of the first and the last sixteen weights
    __m256i minima;      // halves: int16 pairs, integer minima likewise
};

struct Weights {
    bool is_signed = false;
    int offset = 0;       // what w is larger by
    int largest;          // magnitude in w; up to 32, sums of eight products fit int16
    bool halves = false;  // integer scales and minima belong to sixteen weights
};

// Types without a decoder of their own are decoded by their scalar code.
template <class T>
struct Decoder {
    static constexpr Weights weights = {.is_signed = true, .largest = 128, .halves = true};

    static void decode(const uint8_t* p, Super& out) {
        const auto* blocks = reinterpret_cast<const typename T::Block*>(p);
        constexpr int per_block = T::block_values / kBlock;
        alignas(32) float d[kBlocks], m[kBlocks], scale[2][kBlocks];
        alignas(32) int16_t minima[2 * kBlocks];
        for (int j = 0; j < kBlocks; j++) {
            const Block32 block = T::decode(blocks[j / per_block], j % per_block);
            out.w[j] = load256(block.w);
            d[j] = block.d;
            m[j] = block.m;
            for (int h = 0; h < 2; h++) {
                scale[h][j] = static_cast<float>(block.scale[h]);
                minima[2 * j + h] = static_cast<int16_t>(block.minimum[h]);
            }
        }
        out.d = _mm256_load_ps(d);
        out.m = _mm256_load_ps(m);
        for (int h = 0; h < 2; h++) out.scale[h] = _mm256_load_ps(scale[h]);
        out.minima = load256(minima);
    }
};

}  // namespace
}  // namespace tandem::quant
