// Decoders of the types whose blocks hold 64 or 128 values; those of 32 stand in decode_blocks_<isa>.h.
#pragma once
#include "quant/x86/decode.h"

namespace tandem::quant {
namespace {

TANDEM_INLINE __m256i table16(const int8_t* levels, int offset) {
    return _mm256_add_epi8(_mm256_broadcastsi128_si256(load128(levels)), _mm256_set1_epi8(static_cast<char>(offset)));
}

// e8m0_half_float of eight numbers.
TANDEM_INLINE __m256 halves_of_e8m0(__m256i e) {
    const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
    const __m256i subnormal = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
    return _mm256_castsi256_ps(_mm256_blendv_epi8(normal, subnormal, _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e)));
}

template <>
struct Decoder<NVFP4> {
    static constexpr Weights weights = {.offset = 12, .largest = 24, .halves = true};
    TANDEM_INLINE static void decode(const uint8_t* p, Super& out) {
        const __m256i levels = table16(kLevelsFp4, weights.offset);
        const __m128i low = _mm_set1_epi8(15);
        alignas(16) uint8_t scales[2 * kBlocks];
        for (int b = 0; b < 4; b++) {
            std::memcpy(scales + 4 * b, p + 36 * b, 4);
            for (int j = 0; j < 2; j++) {
                const __m128i q = load128(p + 36 * b + 4 + 16 * j);
                const __m128i first = _mm_and_si128(q, low), last = _mm_and_si128(_mm_srli_epi16(q, 4), low);
                const __m256i natural = join_halves(_mm_unpacklo_epi64(first, last), _mm_unpackhi_epi64(first, last));
                out.w[2 * b + j] = _mm256_shuffle_epi8(levels, natural);
            }
        }
        const __m256i units = _mm256_cvtepu8_epi16(load128(scales));
        out.scale[0] = units_of_ue4m3(_mm256_and_si256(units, _mm256_set1_epi32(0xffff)));
        out.scale[1] = units_of_ue4m3(_mm256_srli_epi32(units, 16));
        out.d = _mm256_set1_ps(0x1p-10f);
    }
    // ue4m3_units of eight numbers.
    TANDEM_INLINE static __m256 units_of_ue4m3(__m256i x) {
        const __m256i exponent = _mm256_and_si256(_mm256_srli_epi32(x, 3), _mm256_set1_epi32(15));
        const __m256i mantissa = _mm256_and_si256(x, _mm256_set1_epi32(7));
        const __m256i biased = _mm256_slli_epi32(_mm256_add_epi32(exponent, _mm256_set1_epi32(129)), 23);
        const __m256 normal = _mm256_castsi256_ps(_mm256_or_si256(biased, _mm256_slli_epi32(mantissa, 20)));
        const __m256i is_subnormal = _mm256_cmpeq_epi32(exponent, _mm256_setzero_si256());
        const __m256 units = _mm256_blendv_ps(normal, _mm256_cvtepi32_ps(mantissa), _mm256_castsi256_ps(is_subnormal));
        return _mm256_andnot_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(x, _mm256_set1_epi32(127))), units);
    }
};

template <>
struct Decoder<Q1_0> {
    static constexpr Weights weights = {.offset = 1, .largest = 2};
    TANDEM_INLINE static void decode(const uint8_t* p, Super& out) {
        for (int j = 0; j < kBlocks; j++)
            out.w[j] = _mm256_and_si256(masks_of_bits(load_u32(p + 18 * (j / 4) + 2 + 4 * (j % 4))), _mm256_set1_epi8(2));
        out.d = _mm256_set_m128(_mm256_castps256_ps128(broadcast_f16(p + 18)), _mm256_castps256_ps128(broadcast_f16(p)));
    }
};

template <>
struct Decoder<Q2_0> {
    static constexpr Weights weights = {.offset = 1, .largest = 3};
    TANDEM_INLINE static void decode(const uint8_t* p, Super& out) {
        for (int j = 0; j < kBlocks; j++) {
            out.w[j] = fields_in_order(load_u64(p + 18 * (j / 2) + 2 + 8 * (j % 2)));
        }
        const auto at = [p](int b) { return static_cast<short>(load_u16(p + 18 * b)); };
        out.d = _mm256_cvtph_ps(_mm_setr_epi16(at(0), at(0), at(1), at(1), at(2), at(2), at(3), at(3)));
    }
};

}  // namespace
}  // namespace tandem::quant
