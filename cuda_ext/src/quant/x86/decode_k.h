// Super-blocks whose weights need no code book: the scales of the K types and of IQ4_XS, whose weights each instruction set unpacks
// in its own way (decode_k_<isa>.h), and the decoders of TQ1_0 and TQ2_0.
#pragma once
#include "quant/x86/decode.h"

namespace tandem::quant {
namespace {

// Sixteen integer scales, in order, as those of the first and of the last sixteen weights of the blocks.
TANDEM_INLINE void set_half_scales(__m256i scales, Super& out) {
    out.scale[0] = floats_of_even_i16(scales);
    out.scale[1] = floats_of_odd_i16(scales);
}

TANDEM_INLINE void two_bit_fields(const uint8_t* qs, Super& out) {
    const __m256i low = _mm256_set1_epi8(3);
    for (int h = 0; h < 2; h++) {
        const __m256i q = load256(qs + 32 * h);
        out.w[4 * h] = _mm256_and_si256(q, low);
        out.w[4 * h + 1] = _mm256_and_si256(_mm256_srli_epi16(q, 2), low);
        out.w[4 * h + 2] = _mm256_and_si256(_mm256_srli_epi16(q, 4), low);
        out.w[4 * h + 3] = _mm256_and_si256(_mm256_srli_epi16(q, 6), low);
    }
}

// k_scale of all eight blocks of Q4_K and Q5_K, with the block's f16 d and m.
TANDEM_INLINE void k_scales(const uint8_t* scales, const uint8_t* d, const uint8_t* m, Super& out) {
    const uint32_t a = load_u32(scales), b = load_u32(scales + 4), c = load_u32(scales + 8);
    const uint64_t scale = (a & 0x3f3f3f3fu) | static_cast<uint64_t>((c & 0x0f0f0f0fu) | ((a >> 2) & 0x30303030u)) << 32;
    const uint64_t minimum = (b & 0x3f3f3f3fu) | static_cast<uint64_t>(((c >> 4) & 0x0f0f0f0fu) | ((b >> 2) & 0x30303030u)) << 32;
    out.d = _mm256_mul_ps(broadcast_f16(d), floats_of_u8(scale));
    out.m = _mm256_mul_ps(_mm256_xor_ps(broadcast_f16(m), _mm256_set1_ps(-0.0f)), floats_of_u8(minimum));
}

TANDEM_INLINE void q2_k_scales(const Q2_K::Block& b, Super& out) {
    const __m128i bytes = load128(b.scales), low = _mm_set1_epi8(15);
    set_half_scales(_mm256_cvtepu8_epi16(_mm_and_si128(bytes, low)), out);
    out.minima = _mm256_cvtepu8_epi16(_mm_and_si128(_mm_srli_epi16(bytes, 4), low));
    out.d = broadcast_f16(b.d);
    out.m = _mm256_xor_ps(broadcast_f16(b.m), _mm256_set1_ps(-0.0f));
}

TANDEM_INLINE void q3_k_scales(const Q3_K::Block& b, Super& out) {
    const uint64_t low = load_u64(b.scales), upper = load_u32(b.scales + 8), nibbles = 0x0f0f0f0f0f0f0f0full;
    const uint64_t fields = 0x0303030303030303ull;
    const uint64_t first = (low & nibbles) | ((upper | upper >> 2 << 32) & fields) << 4;
    const uint64_t last = (low >> 4 & nibbles) | ((upper >> 4 | upper >> 6 << 32) & fields) << 4;
    const __m128i bytes = _mm_set_epi64x(static_cast<long long>(last), static_cast<long long>(first));
    set_half_scales(_mm256_sub_epi16(_mm256_cvtepu8_epi16(bytes), _mm256_set1_epi16(32)), out);
    out.d = broadcast_f16(b.d);
}

TANDEM_INLINE void iq4_xs_scales(const IQ4_XS::Block& b, Super& out) {
    const __m256i low = nibbles_in_lanes(b.scales_l);
    const __m256i pairs = _mm256_srlv_epi32(_mm256_set1_epi32(load_u16(b.scales_h)), _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14));
    const __m256i high = _mm256_slli_epi32(_mm256_and_si256(pairs, _mm256_set1_epi32(3)), 4);
    const __m256i scales = _mm256_sub_epi32(_mm256_or_si256(low, high), _mm256_set1_epi32(32));
    out.d = _mm256_mul_ps(broadcast_f16(b.d), _mm256_cvtepi32_ps(scales));
}

template <>
struct Decoder<TQ2_0> {
    static constexpr Weights weights = {.offset = 1, .largest = 3};
    TANDEM_INLINE static void decode(const uint8_t* p, Super& out) {
        const auto& b = *reinterpret_cast<const TQ2_0::Block*>(p);
        two_bit_fields(b.qs, out);
        out.d = broadcast_f16(b.d);
    }
};

// Bytes hold base-3 fractions: the next digit is 0, 1 or 2 from 86 and 171 on, the rest is three times the byte.
TANDEM_INLINE __m256i first_trits(__m256i q) {
    const __m256i from_1 = _mm256_cmpeq_epi8(_mm256_max_epu8(q, _mm256_set1_epi8(86)), q);
    const __m256i from_2 = _mm256_cmpeq_epi8(_mm256_max_epu8(q, _mm256_set1_epi8(static_cast<char>(171))), q);
    return _mm256_sub_epi8(_mm256_setzero_si256(), _mm256_add_epi8(from_1, from_2));
}
TANDEM_INLINE __m256i times_three(__m256i q) {
    return _mm256_add_epi8(q, _mm256_add_epi8(q, q));
}
TANDEM_INLINE __m128i times_three(__m128i q) {
    return _mm_add_epi8(q, _mm_add_epi8(q, q));
}

template <>
struct Decoder<TQ1_0> {
    static constexpr Weights weights = {.offset = 1, .largest = 2};
    TANDEM_INLINE static void decode(const uint8_t* p, Super& out) {
        const auto& b = *reinterpret_cast<const TQ1_0::Block*>(p);
        __m256i q = load256(b.qs);
        for (int j = 0; j < 5; j++, q = times_three(q)) out.w[j] = first_trits(q);
        __m128i r = load128(b.qs + 32), fours = _mm_set1_epi32(static_cast<int>(load_u32(b.qh)));
        for (int j = 5; j < 7; j++, r = times_three(times_three(r))) out.w[j] = first_trits(join_halves(r, times_three(r)));
        const __m128i once = times_three(fours), twice = times_three(once), thrice = times_three(twice);
        fours = _mm_blend_epi32(_mm_blend_epi32(fours, once, 2), _mm_blend_epi32(twice, thrice, 8), 12);
        out.w[7] = first_trits(join_halves(r, fours));
        out.d = broadcast_f16(b.d);
    }
};

}  // namespace
}  // namespace tandem::quant
