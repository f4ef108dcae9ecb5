// Rows of IQ3_XXS and IQ3_S by turned activations: the patterns of a super-block are looked up 64 at a time, and what comes out,
// the same value of each pattern, is multiplied as it lies. Nothing is unpacked, and lane j is of block j modulo 8.
//
//   planes:   register v:   value v of the patterns 0 1 2 3 of blocks 0, 1, ..., 7, then of the patterns 4 5 6 7 of the same
#pragma once
#include "quant/x86/decode_books_avx512.h"
#include "quant/x86/turned_eights.h"

namespace tandem::quant {
namespace {

constexpr int kPlanes = 4;

// Where the bytes of register 0 stand in a super-block; those of register v stand v further on.
struct alignas(64) PlaneOrder {
    uint8_t at[64];
};
constexpr PlaneOrder plane_order() {
    PlaneOrder order{};
    for (int lane = 0; lane < 16; lane++)
        for (int i = 0; i < 4; i++) order.at[4 * lane + i] = static_cast<uint8_t>(kBlock * (lane % 8) + 16 * (lane / 8) + 4 * i);
    return order;
}
constexpr PlaneOrder kPlaneOrder = plane_order();

TANDEM_INLINE void turn_to_planes(const ActGroup& x, TurnedGroup& out) {
    __m512i q[kPlanes], byte = _mm512_load_si512(kPlaneOrder.at);
    for (int i = 0; i < kPlanes; i++) q[i] = _mm512_load_si512(x.q + 64 * i);
    for (int v = 0; v < kPlanes; v++, byte = _mm512_add_epi8(byte, _mm512_set1_epi8(1)))
        _mm512_store_si512(out.q + 2 * v, _mm512_mask_blend_epi8(0xffff0000ffff0000ull, _mm512_permutex2var_epi8(q[0], byte, q[1]),
                                                                 _mm512_permutex2var_epi8(q[2], byte, q[3])));
}

// The numbers of 64 patterns in the order of the planes, and a bit of each likewise.
TANDEM_INLINE __m512i numbers_by_half(const uint8_t* numbers) {
    return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15),
                                    _mm512_loadu_si512(numbers));
}
TANDEM_INLINE uint64_t bits_by_half(uint64_t bits) {
    return _pext_u64(bits, 0x0f0f0f0f0f0f0f0full) | _pext_u64(bits, 0xf0f0f0f0f0f0f0f0ull) << 32;
}

// Two planes of nibbles as four of bytes.
TANDEM_INLINE void split_planes(__m512i first, __m512i last, __m512i* w) {
    w[0] = only(first, 15);
    w[1] = only(_mm512_srli_epi16(first, 4), 15);
    w[2] = only(last, 15);
    w[3] = only(_mm512_srli_epi16(last, 4), 15);
}

// `signs`: a bit for each weight, in order.
template <int num_x>
TANDEM_INLINE void dot_planes(const TurnedInput* x, const __m512i* w, __m256i signs, __m256i* sums) {
    const __m512i two_blocks = _mm512_broadcast_i64x4(signs);
    __m512i bit = only(_mm512_load_si512(kPlaneOrder.at), 63), dots[num_x];
    for (__m512i& d : dots) d = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int v = 0; v < kPlanes; v++, bit = _mm512_add_epi8(bit, _mm512_set1_epi8(1))) {
        const __mmask64 negative = _mm512_bitshuffle_epi64_mask(two_blocks, bit);
#pragma GCC unroll 2
        for (int n = 0; n < num_x; n++) {
            const __m512i q = _mm512_load_si512(x[n].q + 2 * v);
            dots[n] = _mm512_dpbusd_epi32(dots[n], w[v], _mm512_mask_sub_epi8(q, negative, _mm512_setzero_si512(), q));
        }
    }
    for (int n = 0; n < num_x; n++)
        sums[n] = _mm256_add_epi32(_mm512_castsi512_si256(dots[n]), _mm512_extracti64x4_epi64(dots[n], 1));
}

template <>
struct Turned<IQ3_XXS> {
    static constexpr auto turn = turn_to_planes;
    template <int num_x>
    TANDEM_INLINE static void values(const uint8_t* p, const TurnedInput* x, __m256* out) {
        const auto& b = *reinterpret_cast<const IQ3_XXS::Block*>(p);
        const __m512i numbers = numbers_by_half(b.qs);
        const __m256i tops = load256(b.scales);
        const __m512i levels = table512(_mm_setr_epi8(4, 12, 20, 28, 36, 44, 52, 62, 0, 0, 0, 0, 0, 0, 0, 0));
        __m512i w[kPlanes];
        split_planes(look_up(kPlanesIq3Xxs[0], numbers), look_up(kPlanesIq3Xxs[1], numbers), w);
        for (__m512i& values : w) values = _mm512_shuffle_epi8(levels, values);
        __m256i sums[num_x];
        dot_planes<num_x>(x, w, complete_signs(spread_sevens(tops)), sums);
        multiply<num_x>(iq3_xxs_scales(b, tops), sums, out);
    }
};

template <>
struct Turned<IQ3_S> {
    static constexpr auto turn = turn_to_planes;
    template <int num_x>
    TANDEM_INLINE static void values(const uint8_t* p, const TurnedInput* x, __m256* out) {
        const auto& b = *reinterpret_cast<const IQ3_S::Block*>(p);
        const __m512i numbers = numbers_by_half(b.qs);
        const uint64_t ninth = bits_by_half(load_u64(b.qh));
        __m512i w[kPlanes];
        split_planes(look_up(kPlanesIq3S[0], numbers, ninth), look_up(kPlanesIq3S[1], numbers, ninth), w);
        __m256i sums[num_x];
        dot_planes<num_x>(x, w, load256(b.signs), sums);
        multiply<num_x>(iq3_s_scales(b), sums, out);
    }
};

}  // namespace
}  // namespace tandem::quant
