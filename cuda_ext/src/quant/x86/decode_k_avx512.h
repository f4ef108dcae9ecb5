// Decoders of the K types and IQ4_XS: two blocks in a register, so that what they share is unpacked once.
#pragma once
#include "quant/x86/decode_k.h"

namespace tandem::quant {
namespace {

// 32 bytes of a row for two blocks that take different bits of them: the second one's come down by `by_second`.
TANDEM_INLINE __m512i twice(const uint8_t* p) {
    return _mm512_broadcast_i64x4(load256(p));
}
template <int first, int second>
TANDEM_INLINE __m512i shift_right(__m512i v) {
    return _mm512_srlv_epi64(v, _mm512_setr_epi64(first, first, first, first, second, second, second, second));
}
template <int first, int second>
TANDEM_INLINE __m512i shift_left(__m512i v) {
    return _mm512_sllv_epi64(v, _mm512_setr_epi64(first, first, first, first, second, second, second, second));
}
TANDEM_INLINE __m512i only(__m512i v, int bits) {
    return _mm512_and_si512(v, _mm512_set1_epi8(static_cast<char>(bits)));
}
// Blocks 2 i and 2 i + 1.
TANDEM_INLINE void store_pair(Super& out, int i, __m512i w) {
    _mm512_store_si512(out.w + 2 * i, w);
}

template <>
struct Decoder<Q2_K> {
    static constexpr Weights weights = {.largest = 3, .halves = true, .in_pairs = true};
    TANDEM_INLINE static void decode(const uint8_t* p, Super& out) {
        const auto& b = *reinterpret_cast<const Q2_K::Block*>(p);
        for (int h = 0; h < 2; h++) {
            const __m512i q = twice(b.qs + 32 * h);
            store_pair(out, 2 * h, only(shift_right<0, 2>(q), 3));
            store_pair(out, 2 * h + 1, only(shift_right<4, 6>(q), 3));
        }
        q2_k_scales(b, out);
    }
};

template <>
struct Decoder<Q3_K> {
    static constexpr Weights weights = {.offset = 4, .largest = 7, .halves = true, .in_pairs = true};
    TANDEM_INLINE static void decode(const uint8_t* p, Super& out) {
        const auto& b = *reinterpret_cast<const Q3_K::Block*>(p);
        const __m512i high = twice(b.hmask), low[] = {twice(b.qs), twice(b.qs + 32)};
        const auto join = [](__m512i two, __m512i one) { return _mm512_or_si512(only(two, 3), only(one, 4)); };
        store_pair(out, 0, join(shift_right<0, 2>(low[0]), shift_left<2, 1>(high)));
        store_pair(out, 1, join(shift_right<4, 6>(low[0]), shift_right<0, 1>(high)));
        store_pair(out, 2, join(shift_right<0, 2>(low[1]), shift_right<2, 3>(high)));
        store_pair(out, 3, join(shift_right<4, 6>(low[1]), shift_right<4, 5>(high)));
        q3_k_scales(b, out);
    }
};

template <>
struct Decoder<Q4_K> {
    static constexpr Weights weights = {.largest = 15, .in_pairs = true};
    TANDEM_INLINE static void decode(const uint8_t* p, Super& out) {
        const auto& b = *reinterpret_cast<const Q4_K::Block*>(p);
        for (int i = 0; i < 4; i++) store_pair(out, i, only(shift_right<0, 4>(twice(b.qs + 32 * i)), 15));
        k_scales(b.scales, b.d, b.m, out);
    }
};

template <>
struct Decoder<Q5_K> {
    static constexpr Weights weights = {.largest = 31, .in_pairs = true};
    TANDEM_INLINE static void decode(const uint8_t* p, Super& out) {
        const auto& b = *reinterpret_cast<const Q5_K::Block*>(p);
        const __m512i high = twice(b.qh);
        const __m512i fifth[] = {shift_left<4, 3>(high), shift_left<2, 1>(high), shift_right<0, 1>(high), shift_right<2, 3>(high)};
        for (int i = 0; i < 4; i++)
            store_pair(out, i, _mm512_or_si512(only(shift_right<0, 4>(twice(b.qs + 32 * i)), 15), only(fifth[i], 16)));
        k_scales(b.scales, b.d, b.m, out);
    }
};

template <>
struct Decoder<Q6_K> {
    static constexpr Weights weights = {.offset = 32, .largest = 63, .halves = true, .in_pairs = true};
    TANDEM_INLINE static void decode(const uint8_t* p, Super& out) {
        const auto& b = *reinterpret_cast<const Q6_K::Block*>(p);
        for (int h = 0; h < 2; h++) {
            const __m512i low = _mm512_loadu_si512(b.ql + 64 * h), high = twice(b.qh + 32 * h);
            store_pair(out, 2 * h, _mm512_or_si512(only(low, 15), only(shift_left<4, 2>(high), 0x30)));
            store_pair(out, 2 * h + 1, _mm512_or_si512(only(_mm512_srli_epi16(low, 4), 15), only(shift_right<0, 2>(high), 0x30)));
        }
        set_half_scales(_mm256_cvtepi8_epi16(load128(b.scales)), out);
        out.d = broadcast_f16(b.d);
    }
};

}  // namespace
}  // namespace tandem::quant
