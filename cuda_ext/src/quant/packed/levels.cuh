// The four-bit types that choose among sixteen levels: four byte permutations look eight nibbles up.
#pragma once
#include "quant/packed/packed.cuh"

namespace tandem::quant {

// Sixteen int8 levels, four to a word.
struct Levels {
    uint32_t word[4];
};

constexpr Levels packed_levels(const int8_t (&levels)[16]) {
    Levels out{};
    for (int i = 0; i < 16; i++) out.word[i / 4] |= static_cast<uint32_t>(static_cast<uint8_t>(levels[i])) << 8 * (i % 4);
    return out;
}

TANDEM_TABLE Levels kPackedIq4 = packed_levels(kLevelsIq4);
TANDEM_TABLE Levels kPackedFp4 = packed_levels(kLevelsFp4);

struct NibblePair {
    uint32_t low, high;  // of the low and of the high nibbles of four bytes
};

// The levels of four nibbles, the lowest first: both halves of the table, then a choice by each nibble's highest bit. Only the
// lowest three bits of a nibble of `index` may be set.
__device__ __forceinline__ uint32_t four_levels(const Levels& levels, uint32_t index, uint32_t choice) {
    return device::permute(device::permute(levels.word[0], levels.word[1], index),
                           device::permute(levels.word[2], levels.word[3], index), choice);
}
__device__ __forceinline__ NibblePair look_up(const Levels& levels, uint32_t nibbles) {
    const uint32_t index = nibbles & 0x77777777, choice = (nibbles >> 1 & 0x44444444) | 0x32103210;
    const uint32_t first = four_levels(levels, index, choice), last = four_levels(levels, index >> 16, choice >> 16);
    return {device::permute(first, last, 0x6420), device::permute(first, last, 0x7531)};
}

template <>
struct Packed<IQ4_NL> : ByPair<Packed<IQ4_NL>> {
    static constexpr int kFactor = 1, kOffset = 0;
    static constexpr bool kHalves = false;

    __device__ __forceinline__ static void pair(const uint8_t* b, int, int c, const uint8_t*, uint32_t (&w)[2]) {
        const NibblePair found = look_up(kPackedIq4, load_word<2>(b + 2, c));
        w[0] = found.low;
        w[1] = found.high;
    }
    __device__ __forceinline__ static PackedScale scale(const uint8_t* b, int) { return {half_float(load_two_bytes(b))}; }
};

template <>
struct Packed<IQ4_XS> : ByPair<Packed<IQ4_XS>> {
    static constexpr int kFactor = 1, kOffset = 0;
    static constexpr bool kHalves = false;

    __device__ __forceinline__ static void pair(const uint8_t* b, int j, int c, const uint8_t*, uint32_t (&w)[2]) {
        const NibblePair found = look_up(kPackedIq4, load_word<4>(b + 8 + 16 * j, c));
        w[0] = found.low;
        w[1] = found.high;
    }
    __device__ __forceinline__ static PackedScale scale(const uint8_t* b, int j) {
        const uint32_t x = load_word<4>(b, 0), lower = load_word<4>(b + 4, 0);
        const auto scale = static_cast<int>((lower >> 4 * j & 15) | (x >> (16 + 2 * j) & 3) << 4) - 32;
        return {half_float(x), 0, {scale, scale}};
    }
};

template <>
struct Packed<MXFP4> : ByPair<Packed<MXFP4>> {
    static constexpr int kFactor = 1, kOffset = 0;
    static constexpr bool kHalves = false;

    __device__ __forceinline__ static void pair(const uint8_t* b, int, int c, const uint8_t*, uint32_t (&w)[2]) {
        const NibblePair found = look_up(kPackedFp4, load_word<1>(b + 1, c));
        w[0] = found.low;
        w[1] = found.high;
    }
    __device__ __forceinline__ static PackedScale scale(const uint8_t* b, int) { return {e8m0_half_float(b[0])}; }
};

// Sixteen weights are eight bytes: word i of them holds words i and i + 2 of the half.
template <>
struct Packed<NVFP4> {
    static constexpr int kFactor = 1, kOffset = 0;
    static constexpr bool kHalves = true;

    __device__ __forceinline__ static void words(const uint8_t* b, int j, const uint8_t*, uint32_t (&w)[8]) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const NibblePair found = look_up(kPackedFp4, load_word<4>(b + 4 + 16 * j, i));
            w[4 * (i / 2) + i % 2] = found.low;
            w[4 * (i / 2) + i % 2 + 2] = found.high;
        }
    }
    __device__ __forceinline__ static void pair(const uint8_t* b, int j, int c, const uint8_t*, uint32_t (&w)[2]) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const NibblePair found = look_up(kPackedFp4, load_word<4>(b + 4 + 16 * j + 8 * h, c % 2));
            w[h] = c < 2 ? found.low : found.high;
        }
    }
    __device__ __forceinline__ static PackedScale scale(const uint8_t* b, int j) {
        const uint32_t s = load_two_bytes(b + 2 * j);
        return {0x1p-10f, 0, {ue4m3_units(static_cast<uint8_t>(s)), ue4m3_units(static_cast<uint8_t>(s >> 8))}};
    }
};

}  // namespace tandem::quant
