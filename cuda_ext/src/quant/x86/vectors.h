// Vector pieces shared by the AVX2 and the AVX-512 row kernels.
//
// The headers of this folder are compiled once per instruction set: only row_avx2.cpp and row_avx512.cpp include them, and
// everything is in an anonymous namespace so that neither copy can stand in for the other.
#pragma once
#include <immintrin.h>

#include <cstring>

#include "quant/arithmetic.h"

#define TANDEM_INLINE inline __attribute__((always_inline))

namespace tandem::quant {
namespace {

TANDEM_INLINE __m256i load256(const void* p) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
TANDEM_INLINE __m128i load128(const void* p) {
    return _mm_loadu_si128(static_cast<const __m128i*>(p));
}
TANDEM_INLINE uint64_t load_u64(const uint8_t* p) {
    return load_u32(p) | static_cast<uint64_t>(load_u32(p + 4)) << 32;
}

// Eight integers as floats: bytes, or the even or odd ones of sixteen int16.
TANDEM_INLINE __m256 floats_of_u8(__m128i v) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(v));
}
TANDEM_INLINE __m256 floats_of_u8(uint64_t bytes) {
    return floats_of_u8(_mm_cvtsi64_si128(static_cast<long long>(bytes)));
}
TANDEM_INLINE __m256 floats_of_even_i16(__m256i v) {
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(v, 16), 16));
}
TANDEM_INLINE __m256 floats_of_odd_i16(__m256i v) {
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(v, 16));
}

TANDEM_INLINE __m256 broadcast_f16(const uint8_t* p) {
    return _mm256_cvtph_ps(_mm_set1_epi16(static_cast<short>(load_u16(p))));
}
// The f16 at p, p + stride, ...: one for each of eight blocks.
template <int stride>
TANDEM_INLINE __m256 strided_f16(const uint8_t* p) {
    const auto at = [p](int i) { return static_cast<short>(load_u16(p + i * stride)); };
    return _mm256_cvtph_ps(_mm_setr_epi16(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7)));
}

// Sixteen bytes as their low nibbles, then their high ones.
TANDEM_INLINE __m256i split_nibbles(__m128i v) {
    return _mm256_and_si256(_mm256_inserti128_si256(_mm256_castsi128_si256(v), _mm_srli_epi16(v, 4), 1), _mm256_set1_epi8(15));
}
// Four bytes as their eight nibbles, one per lane.
TANDEM_INLINE __m256i nibbles_in_lanes(const uint8_t* p) {
    const __m256i all = _mm256_set1_epi32(static_cast<int>(load_u32(p)));
    return _mm256_and_si256(_mm256_srlv_epi32(all, _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28)), _mm256_set1_epi32(15));
}
// Eight bytes as their fields of two bits.
TANDEM_INLINE __m256i fields_in_order(uint64_t bytes) {
    const __m256i fours = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<long long>(bytes)));
    const __m256i twos = _mm256_or_si256(fours, _mm256_slli_epi32(fours, 6));
    return _mm256_and_si256(_mm256_or_si256(twos, _mm256_slli_epi32(twos, 12)), _mm256_set1_epi8(3));
}
// 32 bits as bytes of 0 or -1.
TANDEM_INLINE __m256i masks_of_bits(uint32_t bits) {
    const __m256i spread =
        _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    const __m256i select = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201ull));
    const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(bits)), spread);
    return _mm256_cmpeq_epi8(_mm256_and_si256(bytes, select), select);
}

TANDEM_INLINE __m128i low_half(__m256i v) {
    return _mm256_castsi256_si128(v);
}
TANDEM_INLINE __m128i high_half(__m256i v) {
    return _mm256_extracti128_si256(v, 1);
}
TANDEM_INLINE __m256i join_halves(__m128i low, __m128i high) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}

// Steps of a transposed sum within 128-bit lanes. Each mixes two vectors so that adding the two results halves the number of
// elements per block. One blend and one shuffle: shuffles have fewer ports.
//   halves:  a = [a0 a1], b = [b0 b1] in 64 bits        -> [a0 b1] and [a1 b0], to be added
//   quarters: [a0 a1 c0 c1], [b0 b1 d0 d1] in 32 bits   -> [a0 b1 c0 d1] and [a1 b0 c1 d0], to be added
struct Mixed {
    __m256i straight, crossed;
};
TANDEM_INLINE Mixed mix_halves(__m256i a, __m256i b) {
    return {_mm256_blend_epi32(a, b, 0xcc), _mm256_alignr_epi8(b, a, 8)};
}
TANDEM_INLINE Mixed mix_quarters(__m256i a, __m256i b) {
    return {_mm256_blend_epi32(a, b, 0xaa), _mm256_shuffle_epi32(_mm256_blend_epi32(a, b, 0x55), 0xb1)};
}

}  // namespace
}  // namespace tandem::quant
