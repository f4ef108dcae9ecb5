// Rows of IQ3_XXS and IQ3_S by turned activations, as in turned_eights.h with patterns of four values.
#pragma once
#include "quant/x86/decode_books_avx2.h"
#include "quant/x86/turned_eights.h"

namespace tandem::quant {
namespace {

// Eight patterns of four values, joined as in join_eights.
template <class At>
TANDEM_INLINE __m256i join_fours(At at) {
    const auto all = [&at](int lane) { return _mm256_set1_epi32(static_cast<int>(at(lane))); };
    const __m256i a = _mm256_blend_epi32(_mm256_blend_epi32(all(0), all(1), 2), _mm256_blend_epi32(all(2), all(3), 8), 12);
    const __m256i b = _mm256_blend_epi32(_mm256_blend_epi32(all(4), all(5), 0x20), _mm256_blend_epi32(all(6), all(7), 0x80), 0xc0);
    return _mm256_blend_epi32(a, b, 0xf0);
}

// pattern(block, k): values 4 k .. 4 k + 3. `in_int16`: sums of so many registers' products fit int16.
template <int num_x, int in_int16, class PatternOf>
TANDEM_INLINE void dot_fours(const TurnedInput* x, PatternOf pattern, __m256i signs, __m256i* sums) {
    __m256i pairs[num_x];
#pragma GCC unroll 8
    for (int k = 0; k < kBlocks; k++) {
        const __m256i w = join_fours([&](int block) { return pattern(block, k); });
        const auto from = [k](int lane) { return (4 * lane + k / 2) * 0x01010101; };
        const __m256i bytes =
            _mm256_shuffle_epi8(signs, _mm256_setr_epi32(from(0), from(1), from(2), from(3), from(0), from(1), from(2), from(3)));
        const __m256i s = signs_of(bytes, _mm256_set1_epi32(static_cast<int>(k % 2 ? 0x80402010u : 0x08040201u)));
#pragma GCC unroll 2
        for (int n = 0; n < num_x; n++) {
            const __m256i products = _mm256_maddubs_epi16(w, _mm256_sign_epi8(x[n].q[k], s));
            pairs[n] = k % in_int16 == 0 ? products : _mm256_add_epi16(pairs[n], products);
            if (k % in_int16 < in_int16 - 1) continue;
            const __m256i fours = _mm256_madd_epi16(pairs[n], ones16());
            sums[n] = k < in_int16 ? fours : _mm256_add_epi32(sums[n], fours);
        }
    }
}

template <>
struct Turned<IQ3_XXS> {
    static constexpr auto turn = turn_to_fours;
    template <int num_x>
    TANDEM_INLINE static void values(const uint8_t* p, const TurnedInput* x, __m256* out) {
        const auto& b = *reinterpret_cast<const IQ3_XXS::Block*>(p);
        const __m256i tops = load256(b.scales);
        __m256i sums[num_x];
        dot_fours<num_x, 2>(
            x, [&b](int block, int k) { return kBookIq3Xxs.pattern[b.qs[8 * block + k]]; }, complete_signs(spread_sevens(tops)),
            sums);
        multiply<num_x>(iq3_xxs_scales(b, tops), sums, out);
    }
};

template <>
struct Turned<IQ3_S> {
    static constexpr auto turn = turn_to_fours;
    template <int num_x>
    TANDEM_INLINE static void values(const uint8_t* p, const TurnedInput* x, __m256* out) {
        const auto& b = *reinterpret_cast<const IQ3_S::Block*>(p);
        const auto ninth = [&b](int h) { return _mm256_and_si256(masks_of_bits(load_u32(b.qh + 4 * h)), _mm256_set1_epi8(1)); };
        const Numbers numbers[] = {{load256(b.qs), ninth(0)}, {load256(b.qs + 32), ninth(1)}};
        const auto pattern = [&numbers](int block, int k) {
            return kBookIq3S.pattern[numbers[block / 4].of[block % 2][block % 4 / 2 * 8 + k]];
        };
        __m256i sums[num_x];
        dot_fours<num_x, 8>(x, pattern, load256(b.signs), sums);
        multiply<num_x>(iq3_s_scales(b), sums, out);
    }
};

}  // namespace
}  // namespace tandem::quant
