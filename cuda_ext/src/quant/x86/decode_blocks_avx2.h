// Decoders of the types of 32-value blocks, a block in a register.
#pragma once
#include "quant/x86/decode_blocks.h"

namespace tandem::quant {
namespace {

TANDEM_INLINE __m256i fifth_bits(const uint8_t* qh) {
    return _mm256_and_si256(masks_of_bits(load_u32(qh)), _mm256_set1_epi8(16));
}
template <>
struct Decoder<Q4_0> {
    static constexpr Weights weights = {.offset = 8, .largest = 15};
    TANDEM_INLINE static void decode(const uint8_t* p, Super& out) {
        for (int j = 0; j < kBlocks; j++) out.w[j] = split_nibbles(load128(p + 18 * j + 2));
        out.d = strided_f16<18>(p);
    }
};

template <>
struct Decoder<Q4_1> {
    static constexpr Weights weights = {.largest = 15};
    TANDEM_INLINE static void decode(const uint8_t* p, Super& out) {
        for (int j = 0; j < kBlocks; j++) out.w[j] = split_nibbles(load128(p + 20 * j + 4));
        out.d = strided_f16<20>(p);
        out.m = strided_f16<20>(p + 2);
    }
};

template <>
struct Decoder<Q5_0> {
    static constexpr Weights weights = {.offset = 16, .largest = 31};
    TANDEM_INLINE static void decode(const uint8_t* p, Super& out) {
        for (int j = 0; j < kBlocks; j++)
            out.w[j] = _mm256_or_si256(split_nibbles(load128(p + 22 * j + 6)), fifth_bits(p + 22 * j + 2));
        out.d = strided_f16<22>(p);
    }
};

template <>
struct Decoder<Q5_1> {
    static constexpr Weights weights = {.largest = 31};
    TANDEM_INLINE static void decode(const uint8_t* p, Super& out) {
        for (int j = 0; j < kBlocks; j++)
            out.w[j] = _mm256_or_si256(split_nibbles(load128(p + 24 * j + 8)), fifth_bits(p + 24 * j + 4));
        out.d = strided_f16<24>(p);
        out.m = strided_f16<24>(p + 2);
    }
};

template <>
struct Decoder<Q8_0> {
    static constexpr Weights weights = {.is_signed = true, .largest = 128};
    TANDEM_INLINE static void decode(const uint8_t* p, Super& out) {
        for (int j = 0; j < kBlocks; j++) out.w[j] = load256(p + 34 * j + 2);
        out.d = strided_f16<34>(p);
    }
};

template <>
struct Decoder<IQ4_NL> {
    static constexpr Weights weights = {.is_signed = true, .largest = 127};
    TANDEM_INLINE static void decode(const uint8_t* p, Super& out) {
        const __m256i levels = table16(kLevelsIq4, 0);
        for (int j = 0; j < kBlocks; j++) out.w[j] = _mm256_shuffle_epi8(levels, split_nibbles(load128(p + 18 * j + 2)));
        out.d = strided_f16<18>(p);
    }
};

template <>
struct Decoder<MXFP4> {
    static constexpr Weights weights = {.offset = 12, .largest = 24};
    TANDEM_INLINE static void decode(const uint8_t* p, Super& out) {
        const __m256i levels = table16(kLevelsFp4, weights.offset);
        alignas(8) uint8_t e[kBlocks];
        for (int j = 0; j < kBlocks; j++) {
            e[j] = p[17 * j];
            out.w[j] = _mm256_shuffle_epi8(levels, split_nibbles(load128(p + 17 * j + 1)));
        }
        out.d = halves_of_e8m0(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<long long>(load_u64(e)))));
    }
};

}  // namespace
}  // namespace tandem::quant
