// Decoders of the types with small code books: pattern numbers and signs are unpacked for a whole super-block at once, then each
// pattern is loaded from memory.
#pragma once
#include "quant/x86/decode_iq.h"

namespace tandem::quant {
namespace {

constexpr auto kBookIq3Xxs = spell_out<uint32_t>(kGridIq3Xxs, iq3_xxs_level);
constexpr auto kBookIq3S = spell_out<uint32_t>(kGridIq3S, iq3_s_level);

template <class Book, class Number>
TANDEM_INLINE __m256i eight_patterns(const Book& book, const Number* numbers) {
    const auto at = [&](int k) { return static_cast<int>(book.pattern[numbers[k]]); };
    return _mm256_setr_epi32(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7));
}
template <class Book, class Number>
TANDEM_INLINE __m256i four_patterns_of(const Book& book, const Number* numbers) {
    const auto at = [&](int k) { return static_cast<long long>(book.pattern[numbers[k]]); };
    return _mm256_setr_epi64x(at(0), at(1), at(2), at(3));
}

// Per 32 bits four times seven bits side by side, to a byte each.
TANDEM_INLINE __m256i spread_sevens(__m256i v) {
    const auto seven = [v](int shift, int at) {
        return _mm256_and_si256(_mm256_slli_epi32(v, shift), _mm256_set1_epi32(0x7f << at));
    };
    return _mm256_or_si256(_mm256_or_si256(seven(0, 0), seven(1, 8)), _mm256_or_si256(seven(2, 16), seven(3, 24)));
}
// signs_of_seven of every byte.
TANDEM_INLINE __m256i complete_signs(__m256i sevens) {
    const __m256i parity =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, -128, -128, 0, -128, 0, 0, -128, -128, 0, 0, -128, 0, -128, -128, 0));
    const __m256i low = _mm256_set1_epi8(15);
    const __m256i odd = _mm256_xor_si256(_mm256_shuffle_epi8(parity, _mm256_and_si256(sevens, low)),
                                         _mm256_shuffle_epi8(parity, _mm256_and_si256(_mm256_srli_epi16(sevens, 4), low)));
    return _mm256_or_si256(sevens, odd);
}

// The signs of a super-block, a word for each block of 32.
struct alignas(32) SignWords {
    uint32_t of[kBlocks];

    explicit SignWords(__m256i signs) { _mm256_store_si256(reinterpret_cast<__m256i*>(of), signs); }
};

template <>
struct Decoder<IQ2_XXS> {
    static constexpr Weights weights = {.offset = 43, .largest = 86};
    TANDEM_INLINE static void decode(const uint8_t* p, Super& out) {
        const auto& b = *reinterpret_cast<const IQ2_XXS::Block*>(p);
        const __m256i tops = second_words(b.qs);
        const SignWords signs(complete_signs(spread_sevens(tops)));
        for (int j = 0; j < kBlocks; j++)
            out.w[j] = apply_signs(four_patterns_of(kBookIq2Xxs, b.qs + 8 * j), signs.of[j], weights.offset);
        out.d = odd_scales(eighth(broadcast_f16(b.d)), _mm256_srli_epi32(tops, 28));
    }
};

template <>
struct Decoder<IQ2_XS> {
    static constexpr Weights weights = {.offset = 43, .largest = 86, .halves = true};
    TANDEM_INLINE static void decode(const uint8_t* p, Super& out) {
        const auto& b = *reinterpret_cast<const IQ2_XS::Block*>(p);
        const __m256i q[2] = {load256(b.qs), load256(b.qs + 32)};
        alignas(32) uint16_t numbers[32];
        for (int h = 0; h < 2; h++)
            _mm256_store_si256(reinterpret_cast<__m256i*>(numbers + 16 * h), _mm256_and_si256(q[h], _mm256_set1_epi16(511)));
        const SignWords signs(complete_signs(upper_sevens(q[0], q[1])));
        for (int j = 0; j < kBlocks; j++)
            out.w[j] = apply_signs(four_patterns_of(kBookIq2Xs, numbers + 4 * j), signs.of[j], weights.offset);
        set_half_scales(odd_half_scales(b.scales), out);
        out.d = eighth(broadcast_f16(b.d));
    }
};

template <>
struct Decoder<IQ3_XXS> {
    static constexpr Weights weights = {.offset = 62, .largest = 124};
    TANDEM_INLINE static void decode(const uint8_t* p, Super& out) {
        const auto& b = *reinterpret_cast<const IQ3_XXS::Block*>(p);
        const __m256i tops = load256(b.scales);
        const SignWords signs(complete_signs(spread_sevens(tops)));
        for (int j = 0; j < kBlocks; j++)
            out.w[j] = apply_signs(eight_patterns(kBookIq3Xxs, b.qs + 8 * j), signs.of[j], weights.offset);
        out.d = iq3_xxs_scales(b, tops);
    }
};

template <>
struct Decoder<IQ3_S> {
    static constexpr Weights weights = {.offset = 16, .largest = 31};
    TANDEM_INLINE static void decode(const uint8_t* p, Super& out) {
        const auto& b = *reinterpret_cast<const IQ3_S::Block*>(p);
        const __m256i bits = _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, -32768);
        alignas(32) uint16_t numbers[64];
        for (int i = 0; i < 4; i++) {
            const __m256i high = _mm256_and_si256(_mm256_set1_epi16(static_cast<short>(load_u16(b.qh + 2 * i))), bits);
            const __m256i ninth = _mm256_and_si256(_mm256_cmpeq_epi16(high, bits), _mm256_set1_epi16(256));
            _mm256_store_si256(reinterpret_cast<__m256i*>(numbers + 16 * i),
                               _mm256_or_si256(_mm256_cvtepu8_epi16(load128(b.qs + 16 * i)), ninth));
        }
        for (int j = 0; j < kBlocks; j++)
            out.w[j] = apply_signs(eight_patterns(kBookIq3S, numbers + 8 * j), load_u32(b.signs + 4 * j), weights.offset);
        out.d = iq3_s_scales(b);
    }
};

}  // namespace
}  // namespace tandem::quant
