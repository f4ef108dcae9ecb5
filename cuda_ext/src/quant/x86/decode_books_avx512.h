// Decoders of the types whose code books fit registers: patterns are looked up 64 at a time by byte permutations (VBMI).
#pragma once
#include "quant/x86/decode_iq.h"

namespace tandem::quant {
namespace {

// One byte of each pattern of a book: two nibbles or four fields of two bits.
template <int size>
struct alignas(64) Plane {
    uint8_t bytes[size];
};

// Values first .. first + 8 / bits - 1 of each pattern, `bits` wide.
template <int bits, int size, class Value>
constexpr Plane<size> plane_of(const uint16_t (&packed)[size], int first, Value value) {
    Plane<size> plane{};
    for (int n = 0; n < size; n++)
        for (int i = 0; i < 8 / bits; i++) plane.bytes[n] |= static_cast<uint8_t>(value(packed[n], first + i) << bits * i);
    return plane;
}

constexpr int iq2_index(uint16_t packed, int i) {
    return (packed >> 2 * i) & 3;
}
constexpr int iq3_index(uint16_t packed, int i) {
    return (packed >> 3 * i) & 7;
}

constexpr Plane<256> kPlanesIq2Xxs[] = {plane_of<2>(kGridIq2Xxs, 0, iq2_index), plane_of<2>(kGridIq2Xxs, 4, iq2_index)};
constexpr Plane<512> kPlanesIq2Xs[] = {plane_of<2>(kGridIq2Xs, 0, iq2_index), plane_of<2>(kGridIq2Xs, 4, iq2_index)};
constexpr Plane<256> kPlanesIq3Xxs[] = {plane_of<4>(kGridIq3Xxs, 0, iq3_index), plane_of<4>(kGridIq3Xxs, 2, iq3_index)};
// The values themselves, 1, 3, ..., 15.
constexpr int iq3_s_value(uint16_t packed, int i) {
    return 2 * iq3_index(packed, i) + 1;
}
constexpr Plane<512> kPlanesIq3S[] = {plane_of<4>(kGridIq3S, 0, iq3_s_value), plane_of<4>(kGridIq3S, 2, iq3_s_value)};

TANDEM_INLINE __m512i look_up(const Plane<256>& plane, __m512i numbers) {
    const auto part = [&](int i) { return _mm512_load_si512(plane.bytes + 64 * i); };
    return _mm512_mask_blend_epi8(_mm512_movepi8_mask(numbers), _mm512_permutex2var_epi8(part(0), numbers, part(1)),
                                  _mm512_permutex2var_epi8(part(2), numbers, part(3)));
}
// `ninth`: the ninth bits of the numbers.
TANDEM_INLINE __m512i look_up(const Plane<512>& plane, __m512i numbers, uint64_t ninth) {
    const auto part = [&](int i) { return _mm512_load_si512(plane.bytes + 64 * i); };
    const auto eighth = _mm512_movepi8_mask(numbers);
    const auto half = [&](int i) {
        return _mm512_mask_blend_epi8(eighth, _mm512_permutex2var_epi8(part(i), numbers, part(i + 1)),
                                      _mm512_permutex2var_epi8(part(i + 2), numbers, part(i + 3)));
    };
    return _mm512_mask_blend_epi8(ninth, half(0), half(4));
}

// Sixteen values for a byte shuffle.
TANDEM_INLINE __m512i table512(__m128i values) {
    return _mm512_broadcast_i32x4(values);
}

// Values with their offset, mirrored at the offset where a sign bit is set: 256 weights to `out`.
TANDEM_INLINE void store_signed(const __m512i* values, const uint8_t* signs, int offset, Super& out) {
    const __m512i twice = _mm512_set1_epi8(static_cast<char>(2 * offset));
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        _mm512_store_si512(out.w + 2 * i, _mm512_mask_sub_epi8(values[i], load_u64(signs + 8 * i), twice, values[i]));
}

// signs_of_seven of every byte.
TANDEM_INLINE __m256i complete_signs(__m256i sevens) {
    const __m256i parity = _mm256_and_si256(_mm256_slli_epi16(_mm256_popcnt_epi8(sevens), 7), _mm256_set1_epi8(-128));
    return _mm256_or_si256(sevens, parity);
}
// The signs of a super-block.
struct alignas(32) SignBytes {
    uint8_t bytes[32];

    explicit SignBytes(__m256i signs) { _mm256_store_si256(reinterpret_cast<__m256i*>(bytes), signs); }
};
// Per 32 bits four times seven bits side by side, to a byte each.
TANDEM_INLINE __m256i spread_sevens(__m256i v) {
    const __m256i at = _mm256_set1_epi64x(0x352e2720150e0700ll);  // bit 0, 7, 14, 21, 32, 39, 46, 53
    return _mm256_and_si256(_mm256_multishift_epi64_epi8(at, v), _mm256_set1_epi8(0x7f));
}

// Two bytes of each of 64 patterns, two nibbles in a byte, to the 256 nibbles in order.
TANDEM_INLINE void spread_nibbles(__m512i first, __m512i last, __m512i* out) {
    // Unpacking works within lanes: words are exchanged so that the lanes come out in order.
    const __m512i turn = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i a = _mm512_permutexvar_epi32(turn, first), b = _mm512_permutexvar_epi32(turn, last), low = _mm512_set1_epi8(15);
    const __m512i bytes[] = {_mm512_unpacklo_epi8(a, b), _mm512_unpackhi_epi8(a, b)};
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
        const __m512i even = _mm512_and_si512(bytes[h], low), odd = _mm512_and_si512(_mm512_srli_epi16(bytes[h], 4), low);
        out[2 * h] = _mm512_unpacklo_epi8(even, odd);
        out[2 * h + 1] = _mm512_unpackhi_epi8(even, odd);
    }
}

// 64 bytes of four fields of two bits, to the 256 fields in order. Leaves other bits above them.
TANDEM_INLINE void spread_fields(__m512i bytes, __m512i* out) {
    const __m512i every_second_bit = _mm512_set1_epi64(0x0e0c0a0806040200ll);
    const __m512i words = _mm512_setr_epi64(0x0100, 0x0302, 0x0504, 0x0706, 0x0908, 0x0b0a, 0x0d0c, 0x0f0e);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m512i spread = _mm512_permutexvar_epi8(_mm512_add_epi8(words, _mm512_set1_epi8(static_cast<char>(16 * i))), bytes);
        out[i] = _mm512_and_si512(_mm512_multishift_epi64_epi8(every_second_bit, spread), _mm512_set1_epi8(3));
    }
}

constexpr int kOffsetIq2 = 43;
TANDEM_INLINE void store_iq2(__m512i fields, const SignBytes& signs, Super& out) {
    const __m512i levels =
        table512(_mm_setr_epi8(8 + kOffsetIq2, 25 + kOffsetIq2, 43 + kOffsetIq2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0));
    __m512i values[4];
    spread_fields(fields, values);
    for (__m512i& value : values) value = _mm512_shuffle_epi8(levels, value);
    store_signed(values, signs.bytes, kOffsetIq2, out);
}

constexpr uint64_t kOddBytes = 0xaaaaaaaaaaaaaaaaull;

template <>
struct Decoder<IQ2_XXS> {
    static constexpr Weights weights = {.offset = kOffsetIq2, .largest = 86, .in_pairs = true};
    TANDEM_INLINE static void decode(const uint8_t* p, Super& out) {
        const auto& b = *reinterpret_cast<const IQ2_XXS::Block*>(p);
        const __m512i q = _mm512_loadu_si512(b.qs);
        // The numbers are the first four of every eight bytes; each twice, for its two bytes of the book.
        const __m512i numbers = _mm512_permutexvar_epi8(
            _mm512_setr_epi64(0x0303020201010000ll, 0x0b0b0a0a09090808ll, 0x1313121211111010ll, 0x1b1b1a1a19191818ll,
                              0x2323222221212020ll, 0x2b2b2a2a29292828ll, 0x3333323231313030ll, 0x3b3b3a3a39393838ll),
            q);
        const __m256i tops = _mm512_castsi512_si256(
            _mm512_permutexvar_epi32(_mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 0, 0, 0, 0, 0, 0, 0, 0), q));
        const __m512i fields =
            _mm512_mask_blend_epi8(kOddBytes, look_up(kPlanesIq2Xxs[0], numbers), look_up(kPlanesIq2Xxs[1], numbers));
        store_iq2(fields, SignBytes(complete_signs(spread_sevens(tops))), out);
        out.d = odd_scales(eighth(broadcast_f16(b.d)), _mm256_srli_epi32(tops, 28));
    }
};

template <>
struct Decoder<IQ2_XS> {
    static constexpr Weights weights = {.offset = kOffsetIq2, .largest = 86, .halves = true, .in_pairs = true};
    TANDEM_INLINE static void decode(const uint8_t* p, Super& out) {
        const auto& b = *reinterpret_cast<const IQ2_XS::Block*>(p);
        const __m512i q = _mm512_loadu_si512(b.qs);
        const __m128i even = _mm_setr_epi8(0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12, 12, 14, 14);
        const __m512i numbers = _mm512_shuffle_epi8(q, _mm512_broadcast_i32x4(even));
        const __m512i high = _mm512_shuffle_epi8(q, _mm512_broadcast_i32x4(_mm_add_epi8(even, _mm_set1_epi8(1))));
        const uint64_t ninth = _mm512_test_epi8_mask(high, _mm512_set1_epi8(1));
        const __m512i fields =
            _mm512_mask_blend_epi8(kOddBytes, look_up(kPlanesIq2Xs[0], numbers, ninth), look_up(kPlanesIq2Xs[1], numbers, ninth));
        store_iq2(fields, SignBytes(complete_signs(_mm512_cvtepi16_epi8(_mm512_srli_epi16(q, 9)))), out);
        set_half_scales(odd_half_scales(b.scales), out);
        out.d = eighth(broadcast_f16(b.d));
    }
};

template <>
struct Decoder<IQ3_XXS> {
    static constexpr Weights weights = {.offset = 62, .largest = 124, .in_pairs = true};
    TANDEM_INLINE static void decode(const uint8_t* p, Super& out) {
        const auto& b = *reinterpret_cast<const IQ3_XXS::Block*>(p);
        const __m512i numbers = _mm512_loadu_si512(b.qs);
        const __m256i tops = load256(b.scales);
        const __m512i levels = table512(_mm_setr_epi8(66, 74, 82, 90, 98, 106, 114, 124, 0, 0, 0, 0, 0, 0, 0, 0));  // 4 + 62, ...
        __m512i values[4];
        spread_nibbles(look_up(kPlanesIq3Xxs[0], numbers), look_up(kPlanesIq3Xxs[1], numbers), values);
        for (__m512i& value : values) value = _mm512_shuffle_epi8(levels, value);
        store_signed(values, SignBytes(complete_signs(spread_sevens(tops))).bytes, weights.offset, out);
        out.d = iq3_xxs_scales(b, tops);
    }
};

template <>
struct Decoder<IQ3_S> {
    static constexpr Weights weights = {.offset = 16, .largest = 31, .in_pairs = true};
    TANDEM_INLINE static void decode(const uint8_t* p, Super& out) {
        const auto& b = *reinterpret_cast<const IQ3_S::Block*>(p);
        const __m512i numbers = _mm512_loadu_si512(b.qs);
        const uint64_t ninth = load_u64(b.qh);
        __m512i values[4];
        spread_nibbles(look_up(kPlanesIq3S[0], numbers, ninth), look_up(kPlanesIq3S[1], numbers, ninth), values);
        for (__m512i& value : values) value = _mm512_add_epi8(value, _mm512_set1_epi8(weights.offset));
        store_signed(values, b.signs, weights.offset, out);
        out.d = iq3_s_scales(b);
    }
};

}  // namespace
}  // namespace tandem::quant
