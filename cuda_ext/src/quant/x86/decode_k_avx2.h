// Decoders of the K types and IQ4_XS, a block in a register.
#pragma once
#include "quant/x86/decode_k.h"

namespace tandem::quant {
namespace {

TANDEM_INLINE void four_bit_fields(const uint8_t* qs, Super& out) {
    const __m256i low = _mm256_set1_epi8(15);
    for (int i = 0; i < 4; i++) {
        const __m256i q = load256(qs + 32 * i);
        out.w[2 * i] = _mm256_and_si256(q, low);
        out.w[2 * i + 1] = _mm256_and_si256(_mm256_srli_epi16(q, 4), low);
    }
}

template <>
struct Decoder<Q2_K> {
    static constexpr Weights weights = {.largest = 3, .halves = true};
    TANDEM_INLINE static void decode(const uint8_t* p, Super& out) {
        const auto& b = *reinterpret_cast<const Q2_K::Block*>(p);
        two_bit_fields(b.qs, out);
        q2_k_scales(b, out);
    }
};

template <>
struct Decoder<Q3_K> {
    static constexpr Weights weights = {.offset = 4, .largest = 7, .halves = true};
    TANDEM_INLINE static void decode(const uint8_t* p, Super& out) {
        const auto& b = *reinterpret_cast<const Q3_K::Block*>(p);
        two_bit_fields(b.qs, out);
        const __m256i high = load256(b.hmask);
        for (int j = 0; j < kBlocks; j++) {
            const __m256i third = j < 2 ? _mm256_slli_epi16(high, 2 - j) : _mm256_srli_epi16(high, j - 2);
            out.w[j] = _mm256_or_si256(out.w[j], _mm256_and_si256(third, _mm256_set1_epi8(4)));
        }
        q3_k_scales(b, out);
    }
};

template <>
struct Decoder<Q4_K> {
    static constexpr Weights weights = {.largest = 15};
    TANDEM_INLINE static void decode(const uint8_t* p, Super& out) {
        const auto& b = *reinterpret_cast<const Q4_K::Block*>(p);
        four_bit_fields(b.qs, out);
        k_scales(b.scales, b.d, b.m, out);
    }
};

template <>
struct Decoder<Q5_K> {
    static constexpr Weights weights = {.largest = 31};
    TANDEM_INLINE static void decode(const uint8_t* p, Super& out) {
        const auto& b = *reinterpret_cast<const Q5_K::Block*>(p);
        four_bit_fields(b.qs, out);
        const __m256i high = load256(b.qh);
        for (int j = 0; j < kBlocks; j++) {
            const __m256i fifth = j < 4 ? _mm256_slli_epi16(high, 4 - j) : _mm256_srli_epi16(high, j - 4);
            out.w[j] = _mm256_or_si256(out.w[j], _mm256_and_si256(fifth, _mm256_set1_epi8(16)));
        }
        k_scales(b.scales, b.d, b.m, out);
    }
};

template <>
struct Decoder<Q6_K> {
    static constexpr Weights weights = {.offset = 32, .largest = 63, .halves = true};
    TANDEM_INLINE static void decode(const uint8_t* p, Super& out) {
        const auto& b = *reinterpret_cast<const Q6_K::Block*>(p);
        const __m256i low = _mm256_set1_epi8(15), upper = _mm256_set1_epi8(0x30);
        for (int h = 0; h < 2; h++) {
            const __m256i x = load256(b.ql + 64 * h), y = load256(b.ql + 64 * h + 32), high = load256(b.qh + 32 * h);
            const auto join = [&](__m256i four, __m256i two) {
                return _mm256_or_si256(_mm256_and_si256(four, low), _mm256_and_si256(two, upper));
            };
            out.w[4 * h] = join(x, _mm256_slli_epi16(high, 4));
            out.w[4 * h + 1] = join(y, _mm256_slli_epi16(high, 2));
            out.w[4 * h + 2] = join(_mm256_srli_epi16(x, 4), high);
            out.w[4 * h + 3] = join(_mm256_srli_epi16(y, 4), _mm256_srli_epi16(high, 2));
        }
        set_half_scales(_mm256_cvtepi8_epi16(load128(b.scales)), out);
        out.d = broadcast_f16(b.d);
    }
};

template <>
struct Decoder<IQ4_XS> {
    static constexpr Weights weights = {.is_signed = true, .largest = 127};
    TANDEM_INLINE static void decode(const uint8_t* p, Super& out) {
        const auto& b = *reinterpret_cast<const IQ4_XS::Block*>(p);
        const __m256i levels = _mm256_broadcastsi128_si256(load128(kLevelsIq4));
        for (int j = 0; j < kBlocks; j++) out.w[j] = _mm256_shuffle_epi8(levels, split_nibbles(load128(b.qs + 16 * j)));
        iq4_xs_scales(b, out);
    }
};

}  // namespace
}  // namespace tandem::quant
