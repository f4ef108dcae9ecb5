// Rows of the types with code books of eight values by turned activations: patterns are loaded straight into the lanes of their
// blocks.
#pragma once
#include "quant/x86/decode_iq.h"
#include "quant/x86/turned.h"

namespace tandem::quant {
namespace {

// Bytes that a shuffle within lanes takes from `first` in each lower half, `last` in each upper half.
TANDEM_INLINE __m256i from_bytes(long long first, long long last) {
    return _mm256_setr_epi64x(first, last, first, last);
}
constexpr long long kEvery = 0x0101010101010101ll;      // a byte eight times
constexpr long long kEveryWord = 0x0001000100010001ll;  // a word four times
constexpr long long word_of(int byte) {                 // the word at `byte`, four times
    return (byte | (byte + 1) << 8) * kEveryWord;
}

// Signs as bytes of 1 or -1. `bytes`: the sign byte of each weight; `select`: its bit.
TANDEM_INLINE __m256i signs_of(__m256i bytes, __m256i select) {
    return _mm256_or_si256(_mm256_cmpeq_epi8(_mm256_and_si256(bytes, select), select), _mm256_set1_epi8(1));
}

// Four patterns of eight values: loads and blends, which have more ports than insertions.
template <class At>
TANDEM_INLINE __m256i join_eights(At at) {
    const auto all = [&at](int lane) { return _mm256_set1_epi64x(static_cast<long long>(at(lane))); };
    return _mm256_blend_epi32(_mm256_blend_epi32(all(0), all(1), 0x0c), _mm256_blend_epi32(all(2), all(3), 0xc0), 0xf0);
}

// The byte 4 * block + k of the blocks of register 2 k + g, eight times each.
TANDEM_INLINE __m256i bytes_of(__m256i bytes, int k, int g) {
    return _mm256_shuffle_epi8(bytes, from_bytes((8 * g + k) * kEvery, (8 * g + 4 + k) * kEvery));
}
// The word 2 * block + h of the same blocks, four times each.
TANDEM_INLINE __m256i words_of(__m256i words, int h, int g) {
    return _mm256_shuffle_epi8(words, from_bytes(word_of(8 * g + 2 * h), word_of(8 * g + 4 + 2 * h)));
}

// Sixteen bytes as their nibbles, low ones first.
TANDEM_INLINE __m256i nibbles_in_order(__m128i v) {
    const __m128i low = _mm_and_si128(v, _mm_set1_epi8(15)), high = _mm_and_si128(_mm_srli_epi16(v, 4), _mm_set1_epi8(15));
    return join_halves(_mm_unpacklo_epi8(low, high), _mm_unpackhi_epi8(low, high));
}

// Bytes in order, with others above them, as numbers of patterns.
struct Numbers {
    alignas(32) uint16_t of[2][16];  // bytes 0..7 and 16..23, then 8..15 and 24..31

    TANDEM_INLINE Numbers(__m256i low, __m256i high) {
        _mm256_store_si256(reinterpret_cast<__m256i*>(of[0]), _mm256_unpacklo_epi8(low, high));
        _mm256_store_si256(reinterpret_cast<__m256i*>(of[1]), _mm256_unpackhi_epi8(low, high));
    }
};

// weights(g, k): of register 2 k + g; inputs(q, g, k): its activations, given the weights' signs; scales(g, h): of its first or
// last sixteen values.
template <int num_x, class WeightsOf, class InputsOf, class ScalesOf>
TANDEM_INLINE void dot_eights(const TurnedInput* x, WeightsOf weights, InputsOf inputs, ScalesOf scales, __m256i* sums) {
    __m256i part[num_x][2];
#pragma GCC unroll 2
    for (int g = 0; g < 2; g++) {
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            const __m256i even = weights(g, 2 * h), odd = weights(g, 2 * h + 1), scale = scales(g, h);
#pragma GCC unroll 2
            for (int n = 0; n < num_x; n++) {
                const __m256i* q = x[n].q + 4 * h + g;
                const __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16(even, inputs(q[0], g, 2 * h)),
                                                       _mm256_maddubs_epi16(odd, inputs(q[2], g, 2 * h + 1)));
                const __m256i scaled = _mm256_madd_epi16(pairs, scale);
                part[n][g] = h == 0 ? scaled : _mm256_add_epi32(part[n][g], scaled);
            }
        }
    }
    for (int n = 0; n < num_x; n++) sums[n] = _mm256_hadd_epi32(part[n][0], part[n][1]);
}

TANDEM_INLINE auto signed_inputs(__m256i signs) {
    return [signs](__m256i q, int g, int k) {
        const __m256i select = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201ull));
        return _mm256_sign_epi8(q, signs_of(bytes_of(signs, k, g), select));
    };
}
TANDEM_INLINE auto same_inputs() {
    return [](__m256i q, int, int) { return q; };
}
TANDEM_INLINE auto eights_scales(__m256i words) {
    return [words](int g, int h) { return words_of(words, h, g); };
}
TANDEM_INLINE auto no_scales() {
    return [](int, int) { return ones16(); };
}
// Block of a lane of the registers 2 k + g.
constexpr int block_of(int g, int lane) {
    return 2 * g + lane % 2 + lane / 2 * 4;
}

template <int num_x>
TANDEM_INLINE void multiply(__m256 d, const __m256i* sums, __m256* out) {
    for (int n = 0; n < num_x; n++) out[n] = _mm256_mul_ps(d, _mm256_cvtepi32_ps(sums[n]));
}

template <>
struct Turned<IQ2_XXS> {
    static constexpr auto turn = turn_to_eights;
    template <int num_x>
    TANDEM_INLINE static void values(const uint8_t* p, const TurnedInput* x, __m256* out) {
        const auto& b = *reinterpret_cast<const IQ2_XXS::Block*>(p);
        const __m256i tops = second_words(b.qs);
        const auto weights = [&b](int g, int k) {
            return join_eights([&](int lane) { return kBookIq2Xxs.pattern[b.qs[8 * block_of(g, lane) + k]]; });
        };
        __m256i sums[num_x];
        dot_eights<num_x>(x, weights, signed_inputs(complete_signs(spread_sevens(tops))), no_scales(), sums);
        multiply<num_x>(odd_scales(eighth(broadcast_f16(b.d)), _mm256_srli_epi32(tops, 28)), sums, out);
    }
};

template <>
struct Turned<IQ2_XS> {
    static constexpr auto turn = turn_to_eights;
    template <int num_x>
    TANDEM_INLINE static void values(const uint8_t* p, const TurnedInput* x, __m256* out) {
        const auto& b = *reinterpret_cast<const IQ2_XS::Block*>(p);
        const __m256i q[2] = {load256(b.qs), load256(b.qs + 32)};
        alignas(32) uint16_t numbers[32];
        for (int h = 0; h < 2; h++)
            _mm256_store_si256(reinterpret_cast<__m256i*>(numbers + 16 * h), _mm256_and_si256(q[h], _mm256_set1_epi16(511)));
        const auto weights = [&numbers](int g, int k) {
            return join_eights([&](int lane) { return kBookIq2Xs.pattern[numbers[4 * block_of(g, lane) + k]]; });
        };
        __m256i sums[num_x];
        dot_eights<num_x>(x, weights, signed_inputs(complete_signs(upper_sevens(q[0], q[1]))),
                          eights_scales(odd_half_scales(b.scales)), sums);
        multiply<num_x>(eighth(broadcast_f16(b.d)), sums, out);
    }
};

template <>
struct Turned<IQ2_S> {
    static constexpr auto turn = turn_to_eights;
    template <int num_x>
    TANDEM_INLINE static void values(const uint8_t* p, const TurnedInput* x, __m256* out) {
        const auto& b = *reinterpret_cast<const IQ2_S::Block*>(p);
        const Numbers numbers(load256(b.qs), fields_in_order(load_u64(b.qh)));
        const auto weights = [&numbers](int g, int k) {
            return join_eights([&](int lane) { return kBookIq2S.pattern[numbers.of[g][4 * lane + k]]; });
        };
        __m256i sums[num_x];
        dot_eights<num_x>(x, weights, signed_inputs(load256(b.signs)), eights_scales(odd_half_scales(b.scales)), sums);
        multiply<num_x>(eighth(broadcast_f16(b.d)), sums, out);
    }
};

template <>
struct Turned<IQ1_S> {
    static constexpr auto turn = turn_to_eights;
    template <int num_x>
    TANDEM_INLINE static void values(const uint8_t* p, const TurnedInput* x, __m256* out) {
        const auto& b = *reinterpret_cast<const IQ1_S::Block*>(p);
        const __m256i high = _mm256_cvtepu16_epi32(load128(b.qh));
        const auto field = [high](int k) {
            return _mm256_and_si256(_mm256_slli_epi32(high, 5 * k), _mm256_set1_epi32(7 << 8 * k));
        };
        const Numbers numbers(load256(b.qs),
                              _mm256_or_si256(_mm256_or_si256(field(0), field(1)), _mm256_or_si256(field(2), field(3))));
        const auto weights = [&numbers](int g, int k) {
            return join_eights([&](int lane) { return kBookIq1.pattern[numbers.of[g][4 * lane + k]]; });
        };
        __m256i sums[num_x];
        dot_eights<num_x>(x, weights, same_inputs(), no_scales(), sums);
        // What the patterns are larger by: 7 where the shift is up, else 9.
        const __m256i down = _mm256_srli_epi32(high, 15),
                      offset = _mm256_add_epi32(_mm256_or_si256(_mm256_slli_epi32(down, 1), _mm256_slli_epi32(down, 17)),
                                                _mm256_set1_epi32(0x00070007));
        for (int n = 0; n < num_x; n++) sums[n] = _mm256_sub_epi32(sums[n], _mm256_madd_epi16(x[n].sum16(), offset));
        const __m256i s = _mm256_and_si256(_mm256_srli_epi32(high, 12), _mm256_set1_epi32(7));
        multiply<num_x>(odd_scales(eighth(broadcast_f16(b.d)), s), sums, out);
    }
};

template <>
struct Turned<IQ1_M> {
    static constexpr auto turn = turn_to_eights;
    template <int num_x>
    TANDEM_INLINE static void values(const uint8_t* p, const TurnedInput* x, __m256* out) {
        const auto& b = *reinterpret_cast<const IQ1_M::Block*>(p);
        const __m256i high = nibbles_in_order(load128(b.qh));
        const Numbers numbers(load256(b.qs), _mm256_and_si256(high, _mm256_set1_epi8(7)));
        const __m256i eight = _mm256_set1_epi8(8);
        const __m256i up = _mm256_and_si256(_mm256_cmpgt_epi8(eight, high), _mm256_set1_epi8(2));
        const auto weights = [&numbers, up](int g, int k) {
            const __m256i patterns = join_eights([&](int lane) { return kBookIq1.pattern[numbers.of[g][4 * lane + k]]; });
            return _mm256_add_epi8(patterns, bytes_of(up, k, g));
        };
        const __m256i scales = Decoder<IQ1_M>::scales_of(b);
        __m256i sums[num_x];
        dot_eights<num_x>(x, weights, same_inputs(), eights_scales(scales), sums);
        const __m256i offset = _mm256_mullo_epi16(scales, _mm256_set1_epi16(9));
        for (int n = 0; n < num_x; n++) sums[n] = _mm256_sub_epi32(sums[n], _mm256_madd_epi16(x[n].sum16(), offset));
        multiply<num_x>(_mm256_set1_ps(f16_float(IQ1_M::d_bits(b)) * 0.125f), sums, out);
    }
};

}  // namespace
}  // namespace tandem::quant
