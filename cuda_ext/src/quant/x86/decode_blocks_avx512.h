// Decoders of the types of 32-value blocks and of IQ4_XS, two blocks in a register.
#pragma once
#include "quant/x86/decode_blocks.h"
#include "quant/x86/decode_k_avx512.h"

namespace tandem::quant {
namespace {

// Sixteen bytes of each of two blocks: their low nibbles, then their high ones, block by block.
TANDEM_INLINE __m512i split_nibbles(__m256i two_blocks) {
    const __m512i each_twice =
        _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 1, 0, 1, 2, 3, 2, 3), _mm512_castsi256_si512(two_blocks));
    return only(_mm512_srlv_epi64(each_twice, _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4)), 15);
}
// Of blocks 2 i and 2 i + 1; `p`: the nibbles of block 0.
template <int stride>
TANDEM_INLINE __m512i nibbles_of(const uint8_t* p, int i) {
    return split_nibbles(join_halves(load128(p + 2 * i * stride), load128(p + (2 * i + 1) * stride)));
}
// 16 where a block has a fifth bit; `qh`: the bits of block 0.
template <int stride>
TANDEM_INLINE __m512i with_fifth_bits(__m512i nibbles, const uint8_t* qh, int i) {
    const uint64_t bits = load_u32(qh + 2 * i * stride) | static_cast<uint64_t>(load_u32(qh + (2 * i + 1) * stride)) << 32;
    return _mm512_mask_add_epi8(nibbles, bits, nibbles, _mm512_set1_epi8(16));
}

// The two bytes at the head of four blocks, in the lower half. Reads no byte behind them.
template <int stride>
TANDEM_INLINE __m128i four_heads(const uint8_t* p) {
    constexpr int second = 4 * stride - 64 < 64 ? 4 * stride - 64 : 64;  // where the second register begins, if one is not enough
    constexpr auto at = [](int i) {
        const int byte = i * stride;
        return static_cast<short>(byte + 2 <= 64 ? byte / 2 : 32 + (byte - second) / 2);
    };
    const __m512i index = _mm512_castsi128_si512(_mm_setr_epi16(at(0), at(1), at(2), at(3), 0, 0, 0, 0));
    if constexpr (3 * stride + 2 <= 64) return _mm512_castsi512_si128(_mm512_permutexvar_epi16(index, _mm512_loadu_si512(p)));
    return _mm512_castsi512_si128(_mm512_permutex2var_epi16(_mm512_loadu_si512(p), index, _mm512_loadu_si512(p + second)));
}
template <int stride>
TANDEM_INLINE __m256 eight_heads(const uint8_t* p) {
    return _mm256_cvtph_ps(_mm_unpacklo_epi64(four_heads<stride>(p), four_heads<stride>(p + 4 * stride)));
}

TANDEM_INLINE __m512i look_up16(const int8_t* levels, int offset, __m512i nibbles) {
    const __m128i table = _mm_add_epi8(load128(levels), _mm_set1_epi8(static_cast<char>(offset)));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), nibbles);
}

template <>
struct Decoder<Q4_0> {
    static constexpr Weights weights = {.offset = 8, .largest = 15, .in_pairs = true};
    TANDEM_INLINE static void decode(const uint8_t* p, Super& out) {
        for (int i = 0; i < 4; i++) store_pair(out, i, nibbles_of<18>(p + 2, i));
        out.d = eight_heads<18>(p);
    }
};

template <>
struct Decoder<Q4_1> {
    static constexpr Weights weights = {.largest = 15, .in_pairs = true};
    TANDEM_INLINE static void decode(const uint8_t* p, Super& out) {
        for (int i = 0; i < 4; i++) store_pair(out, i, nibbles_of<20>(p + 4, i));
        out.d = eight_heads<20>(p);
        out.m = strided_f16<20>(p + 2);
    }
};

template <>
struct Decoder<Q5_0> {
    static constexpr Weights weights = {.offset = 16, .largest = 31, .in_pairs = true};
    TANDEM_INLINE static void decode(const uint8_t* p, Super& out) {
        for (int i = 0; i < 4; i++) store_pair(out, i, with_fifth_bits<22>(nibbles_of<22>(p + 6, i), p + 2, i));
        out.d = eight_heads<22>(p);
    }
};

template <>
struct Decoder<Q5_1> {
    static constexpr Weights weights = {.largest = 31, .in_pairs = true};
    TANDEM_INLINE static void decode(const uint8_t* p, Super& out) {
        for (int i = 0; i < 4; i++) store_pair(out, i, with_fifth_bits<24>(nibbles_of<24>(p + 8, i), p + 4, i));
        out.d = eight_heads<24>(p);
        out.m = strided_f16<24>(p + 2);
    }
};

template <>
struct Decoder<Q8_0> {
    static constexpr Weights weights = {.offset = 128, .largest = 255, .in_pairs = true};
    TANDEM_INLINE static void decode(const uint8_t* p, Super& out) {
        for (int i = 0; i < 4; i++) {
            const __m512i first = _mm512_castsi256_si512(load256(p + 68 * i + 2));
            const __m512i w = _mm512_inserti64x4(first, load256(p + 68 * i + 36), 1);
            store_pair(out, i, _mm512_xor_si512(w, _mm512_set1_epi8(-128)));
        }
        out.d = eight_heads<34>(p);
    }
};

template <>
struct Decoder<IQ4_NL> {
    static constexpr Weights weights = {.offset = 127, .largest = 240, .in_pairs = true};
    TANDEM_INLINE static void decode(const uint8_t* p, Super& out) {
        for (int i = 0; i < 4; i++) store_pair(out, i, look_up16(kLevelsIq4, weights.offset, nibbles_of<18>(p + 2, i)));
        out.d = eight_heads<18>(p);
    }
};

template <>
struct Decoder<IQ4_XS> {
    static constexpr Weights weights = {.offset = 127, .largest = 240, .in_pairs = true};
    TANDEM_INLINE static void decode(const uint8_t* p, Super& out) {
        const auto& b = *reinterpret_cast<const IQ4_XS::Block*>(p);
        for (int i = 0; i < 4; i++)
            store_pair(out, i, look_up16(kLevelsIq4, weights.offset, split_nibbles(load256(b.qs + 32 * i))));
        iq4_xs_scales(b, out);
    }
};

template <>
struct Decoder<MXFP4> {
    static constexpr Weights weights = {.offset = 12, .largest = 24, .in_pairs = true};
    TANDEM_INLINE static void decode(const uint8_t* p, Super& out) {
        for (int i = 0; i < 4; i++) store_pair(out, i, look_up16(kLevelsFp4, weights.offset, nibbles_of<17>(p + 1, i)));
        const __m512i heads = _mm512_setr_epi64(0x7766554433221100ll, 0, 0, 0, 0, 0, 0, 0);
        const __m512i exponents = _mm512_permutex2var_epi8(_mm512_loadu_si512(p), heads, _mm512_loadu_si512(p + 64));
        out.d = halves_of_e8m0(_mm256_cvtepu8_epi32(_mm512_castsi512_si128(exponents)));
    }
};

}  // namespace
}  // namespace tandem::quant
