// Decoders of the types with code books: patterns from a table, then signs or shifts. Those whose books fit the registers of
// AVX-512 stand in decode_books_<isa>.h.
#pragma once
#include "quant/x86/decode.h"
#include "quant/x86/decode_k.h"

namespace tandem::quant {
namespace {

// A code book spelt out, one byte per value.
template <class Word, int size>
struct Book {
    alignas(64) Word pattern[size];
};

template <class Word, int size, class Level>
constexpr Book<Word, size> spell_out(const uint16_t (&packed)[size], Level level) {
    Book<Word, size> book{};
    for (int n = 0; n < size; n++)
        for (int i = 0; i < static_cast<int>(sizeof(Word)); i++)
            book.pattern[n] |= static_cast<Word>(static_cast<uint8_t>(level(packed[n], i))) << 8 * i;
    return book;
}

constexpr auto kBookIq2Xxs = spell_out<uint64_t>(kGridIq2Xxs, iq2_level);
constexpr auto kBookIq2Xs = spell_out<uint64_t>(kGridIq2Xs, iq2_level);
constexpr auto kBookIq2S = spell_out<uint64_t>(kGridIq2S, iq2_level);
constexpr auto kBookIq1 = spell_out<uint64_t>(kGridIq1, [](uint16_t packed, int i) { return 8 * iq1_level(packed, i) + 8; });

template <class Book, class Index>
TANDEM_INLINE __m256i four_patterns(const Book& book, Index index) {
    const auto at = [&](int k) { return static_cast<long long>(book.pattern[index(k)]); };
    return _mm256_setr_epi64x(at(0), at(1), at(2), at(3));
}
// Patterns negated where a sign bit is set, moved up to be unsigned.
TANDEM_INLINE __m256i apply_signs(__m256i patterns, uint32_t signs, int offset) {
    const __m256i negative = masks_of_bits(signs);
    const __m256i weights = _mm256_sub_epi8(_mm256_xor_si256(patterns, negative), negative);
    return _mm256_add_epi8(weights, _mm256_set1_epi8(static_cast<char>(offset)));
}
// The second of every two words of 64 bytes.
TANDEM_INLINE __m256i second_words(const uint8_t* p) {
    const __m256i mixed = _mm256_blend_epi32(_mm256_srli_epi64(load256(p), 32), load256(p + 32), 0xaa);  // 0, 4, 1, 5, 2, 6, 3, 7
    return _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
}
// The upper seven bits of 32 words, to a byte each.
TANDEM_INLINE __m256i upper_sevens(__m256i first, __m256i last) {
    return _mm256_permute4x64_epi64(_mm256_packus_epi16(_mm256_srli_epi16(first, 9), _mm256_srli_epi16(last, 9)), 0xd8);
}

// 2 s + 1 of words.
TANDEM_INLINE __m256i odd_words(__m256i s) {
    return _mm256_add_epi16(_mm256_add_epi16(s, s), _mm256_set1_epi16(1));
}
// Sixteen four-bit numbers s, low nibbles first, as scales 2 s + 1.
TANDEM_INLINE __m256i odd_half_scales(const uint8_t* nibbles) {
    const __m128i v = _mm_cvtsi64_si128(static_cast<long long>(load_u64(nibbles))), low = _mm_set1_epi8(15);
    const __m128i bytes = _mm_unpacklo_epi8(_mm_and_si128(v, low), _mm_and_si128(_mm_srli_epi16(v, 4), low));
    return odd_words(_mm256_cvtepu8_epi16(bytes));
}
// d * (2 s + 1) of eight blocks, s >= 0.
TANDEM_INLINE __m256 odd_scales(__m256 d, __m256i s) {
    return _mm256_mul_ps(d, _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_add_epi32(s, s), _mm256_set1_epi32(1))));
}
TANDEM_INLINE __m256 eighth(__m256 d) {
    return _mm256_mul_ps(d, _mm256_set1_ps(0.125f));
}
// `tops`: the words that hold the scales, in their uppermost bits.
TANDEM_INLINE __m256 iq3_xxs_scales(const IQ3_XXS::Block& b, __m256i tops) {
    return odd_scales(_mm256_mul_ps(broadcast_f16(b.d), _mm256_set1_ps(0.25f)), _mm256_srli_epi32(tops, 28));
}
TANDEM_INLINE __m256 iq3_s_scales(const IQ3_S::Block& b) {
    return odd_scales(broadcast_f16(b.d), nibbles_in_lanes(b.scales));
}

template <>
struct Decoder<IQ2_S> {
    static constexpr Weights weights = {.offset = 43, .largest = 86, .halves = true};
    TANDEM_INLINE static void decode(const uint8_t* p, Super& out) {
        const auto& b = *reinterpret_cast<const IQ2_S::Block*>(p);
        for (int j = 0; j < kBlocks; j++) {
            const __m256i patterns = four_patterns(kBookIq2S, [&](int k) { return b.qs[4 * j + k] | (b.qh[j] >> 2 * k & 3) << 8; });
            out.w[j] = apply_signs(patterns, load_u32(b.signs + 4 * j), weights.offset);
        }
        set_half_scales(odd_half_scales(b.scales), out);
        out.d = eighth(broadcast_f16(b.d));
    }
};

template <>
struct Decoder<IQ1_S> {
    static constexpr Weights weights = {.offset = 9, .largest = 18};
    TANDEM_INLINE static void decode(const uint8_t* p, Super& out) {
        const auto& b = *reinterpret_cast<const IQ1_S::Block*>(p);
        for (int j = 0; j < kBlocks; j++) {
            const uint32_t high = load_u16(b.qh + 2 * j);
            const __m256i patterns = four_patterns(kBookIq1, [&](int k) { return b.qs[4 * j + k] | (high >> 3 * k & 7) << 8; });
            out.w[j] = _mm256_add_epi8(patterns, _mm256_set1_epi8(static_cast<char>(high & 0x8000 ? 0 : 2)));
        }
        const __m256i s = _mm256_and_si256(_mm256_srli_epi32(_mm256_cvtepu16_epi32(load128(b.qh)), 12), _mm256_set1_epi32(7));
        out.d = odd_scales(eighth(broadcast_f16(b.d)), s);
    }
};

template <>
struct Decoder<IQ1_M> {
    static constexpr Weights weights = {.offset = 9, .largest = 18, .halves = true};
    TANDEM_INLINE static void decode(const uint8_t* p, Super& out) {
        const auto& b = *reinterpret_cast<const IQ1_M::Block*>(p);
        for (int j = 0; j < kBlocks; j++) {
            const uint32_t high = load_u16(b.qh + 2 * j);
            const __m256i patterns = four_patterns(kBookIq1, [&](int k) { return b.qs[4 * j + k] | (high >> 4 * k & 7) << 8; });
            const auto shift = [&](int k) { return high >> 4 * k & 8 ? kDown : kUp; };
            out.w[j] = _mm256_add_epi8(patterns, _mm256_setr_epi64x(shift(0), shift(1), shift(2), shift(3)));
        }
        set_half_scales(scales_of(b), out);
        out.d = _mm256_set1_ps(f16_float(IQ1_M::d_bits(b)) * 0.125f);
    }
    static constexpr long long kUp = 0x0202020202020202ll, kDown = 0;
    // Four three-bit scales in each of four 16-bit words, to sixteen words.
    TANDEM_INLINE static __m256i scales_of(const IQ1_M::Block& b) {
        const __m256i words = _mm256_shuffle_epi8(
            _mm256_broadcastsi128_si256(_mm_cvtsi64_si128(static_cast<long long>(load_u64(b.scales)))),
            _mm256_setr_epi8(0, 1, 0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3, 2, 3, 4, 5, 4, 5, 4, 5, 4, 5, 6, 7, 6, 7, 6, 7, 6, 7));
        const __m256i to_top = _mm256_set1_epi64x(0x0010008004002000ll);  // times 2^13, 2^10, 2^7, 2^4
        return odd_words(_mm256_srli_epi16(_mm256_mullo_epi16(words, to_top), 13));
    }
};

}  // namespace
}  // namespace tandem::quant
