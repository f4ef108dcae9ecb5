// One or two input rows by weights whose blocks lie across one another or come out of code books: activations are turned once per
// call, so that a lane of a register belongs to one block and sums need no transposing.
//
//   fours:   register k:          values 4 k .. 4 k + 3 of blocks 0 1 2 3 | 4 5 6 7
//   eights:  register 2 k + g:    values 8 k .. 8 k + 7 of blocks 0 1 | 4 5 (g = 0) and 2 3 | 6 7 (g = 1)
#pragma once
#include "quant/x86/frame.h"
#include "quant/x86/tile.h"

namespace tandem::quant {
namespace {

struct alignas(64) TurnedGroup {
    __m256i q[kBlocks];
};

TANDEM_INLINE void leave_as_it_is(const ActGroup& x, TurnedGroup& out) {
    for (int j = 0; j < kBlocks; j++) out.q[j] = load256(x.q + kBlock * j);
}

TANDEM_INLINE void turn_to_fours(const ActGroup& x, TurnedGroup& out) {
    leave_as_it_is(x, out);
    transpose8(out.q);
}

TANDEM_INLINE void turn_to_eights(const ActGroup& x, TurnedGroup& out) {
    turn_to_fours(x, out);
    for (int j = 0; j < kBlocks; j += 2) {
        const __m256i even = out.q[j], odd = out.q[j + 1];
        out.q[j] = _mm256_unpacklo_epi32(even, odd);
        out.q[j + 1] = _mm256_unpackhi_epi32(even, odd);
    }
}

// An input row's super-block.
struct TurnedInput {
    const __m256i* q;
    const ActGroup* group;

    TANDEM_INLINE __m256i sum16() const { return load256(group->sum16); }
};

// One for each type that is multiplied so: `turn`, one of the above, and values(block bytes, x, out), the values of its eight
// blocks by each of num_x input rows.
template <class T>
struct Turned;

TANDEM_INLINE __m256i ones16() {
    return _mm256_set1_epi16(1);
}
constexpr int64_t kMaxTurned = 64;  // super-blocks, 16,384 values: longer rows are multiplied without

template <class T>
concept HasTurned = requires { Turned<T>::turn; };

// A weight row for input rows `first` and, with num_x = 2, the next one; `turned`: their super-blocks.
template <class T, int num_x>
void dot_turned_row(const Row& row, int first, const TurnedGroup (*turned)[kMaxTurned]) {
    add_terms<T, num_x>(row, first, [&](const uint8_t* super, int64_t index, __m256* terms) {
        TurnedInput x[num_x];
        for (int n = 0; n < num_x; n++) x[n] = {turned[n][index].q, row.x[first + n].groups + index};
        Turned<T>::template values<num_x>(super, x, terms);
        for (int n = 0; n < num_x; n++) terms[n] = _mm256_mul_ps(_mm256_load_ps(x[n].group->d), terms[n]);
    });
}

// ---- fields of two bits ----

// Half a block's registers, as weights times 1, 4, 1, 4, ... by block.
struct TwoBitHalf {
    __m256i low, high;

    // `qs`: the half's bytes of blocks 0..3; those of blocks 4..7 lie 32 bytes further on.
    TANDEM_INLINE explicit TwoBitHalf(const uint8_t* qs)
        : low(join_halves(load128(qs), load128(qs + 32))), high(_mm256_srli_epi16(low, 4)) {}

    template <int k>
    TANDEM_INLINE __m256i at() const {
        const __m256 fours = _mm256_shuffle_ps(_mm256_castsi256_ps(low), _mm256_castsi256_ps(high), k * 0x55);
        return _mm256_and_si256(_mm256_castps_si256(fours), _mm256_set1_epi64x(0x0c0c0c0c03030303ll));
    }
    TANDEM_INLINE __m256i dot(const __m256i* q) const {  // int16; at most 4 * 2 * 12 * 127
        const __m256i a = _mm256_add_epi16(_mm256_maddubs_epi16(at<0>(), q[0]), _mm256_maddubs_epi16(at<1>(), q[1]));
        const __m256i b = _mm256_add_epi16(_mm256_maddubs_epi16(at<2>(), q[2]), _mm256_maddubs_epi16(at<3>(), q[3]));
        return _mm256_add_epi16(a, b);
    }
    TANDEM_INLINE static __m256 without_factor(__m256 d) {
        return _mm256_mul_ps(d, _mm256_setr_ps(1, 0.25f, 1, 0.25f, 1, 0.25f, 1, 0.25f));
    }
};

template <>
struct Turned<Q2_K> {
    static constexpr auto turn = turn_to_fours;
    template <int num_x>
    TANDEM_INLINE static void values(const uint8_t* p, const TurnedInput* x, __m256* out) {
        const auto& b = *reinterpret_cast<const Q2_K::Block*>(p);
        const TwoBitHalf first(b.qs), last(b.qs + 16);
        const __m256i bytes = _mm256_broadcastsi128_si256(load128(b.scales)), low = _mm256_set1_epi8(15);
        const __m256i scales = _mm256_and_si256(bytes, low), minima = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low);
        // Bytes to words: one scale of each block twice, or both minima of each block.
        const auto spread = [](int a, int b, int block) {
            return static_cast<int>(0x80008000u) | (2 * block + b) << 16 | (2 * block + a);
        };
        const auto of_blocks = [spread](int a, int b) {
            return _mm256_setr_epi32(spread(a, b, 0), spread(a, b, 1), spread(a, b, 2), spread(a, b, 3), spread(a, b, 4),
                                     spread(a, b, 5), spread(a, b, 6), spread(a, b, 7));
        };
        const __m256i scale[] = {_mm256_shuffle_epi8(scales, of_blocks(0, 0)), _mm256_shuffle_epi8(scales, of_blocks(1, 1))};
        const __m256i minimum = _mm256_shuffle_epi8(minima, of_blocks(0, 1));
        const __m256 d = TwoBitHalf::without_factor(broadcast_f16(b.d));
        const __m256 m = _mm256_xor_ps(broadcast_f16(b.m), _mm256_set1_ps(-0.0f));
#pragma GCC unroll 2
        for (int n = 0; n < num_x; n++) {
            const __m256i sums =
                _mm256_add_epi32(_mm256_madd_epi16(first.dot(x[n].q), scale[0]), _mm256_madd_epi16(last.dot(x[n].q + 4), scale[1]));
            const __m256 shift = _mm256_mul_ps(m, _mm256_cvtepi32_ps(_mm256_madd_epi16(x[n].sum16(), minimum)));
            out[n] = _mm256_fmadd_ps(d, _mm256_cvtepi32_ps(sums), shift);
        }
    }
};

template <>
struct Turned<TQ2_0> {
    static constexpr auto turn = turn_to_fours;
    template <int num_x>
    TANDEM_INLINE static void values(const uint8_t* p, const TurnedInput* x, __m256* out) {
        const auto& b = *reinterpret_cast<const TQ2_0::Block*>(p);
        const TwoBitHalf first(b.qs), last(b.qs + 16);
        const __m256i one = _mm256_set1_epi64x(0x0004000400010001ll);
        const __m256 d = TwoBitHalf::without_factor(broadcast_f16(b.d));
#pragma GCC unroll 2
        for (int n = 0; n < num_x; n++) {
            const __m256i dots = _mm256_add_epi16(first.dot(x[n].q), last.dot(x[n].q + 4));
            const __m256i sums = _mm256_sub_epi32(_mm256_madd_epi16(dots, ones16()), _mm256_madd_epi16(x[n].sum16(), one));
            out[n] = _mm256_mul_ps(d, _mm256_cvtepi32_ps(sums));
        }
    }
};

// ---- digits in base three ----

template <>
struct Turned<TQ1_0> {
    static constexpr auto turn = leave_as_it_is;
    template <int num_x>
    TANDEM_INLINE static void values(const uint8_t* p, const TurnedInput* x, __m256* out) {
        const auto& b = *reinterpret_cast<const TQ1_0::Block*>(p);
        // All bytes less 128: comparisons are of signed bytes, and three times the byte is less 128 again.
        __m256i q = _mm256_xor_si256(load256(b.qs), _mm256_set1_epi8(-128));
        __m256i w[kBlocks];
        for (int j = 0; j < 5; j++, q = times_three(q)) w[j] = trits(q);
        const __m128i r = _mm_xor_si128(load128(b.qs + 32), _mm_set1_epi8(-128));
        __m256i pair = join_halves(r, times_three(r));
        w[5] = trits(pair);
        pair = times_three(times_three(pair));
        w[6] = trits(pair);
        __m128i fours = _mm_xor_si128(_mm_set1_epi32(static_cast<int>(load_u32(b.qh))), _mm_set1_epi8(-128));
        const __m128i once = times_three(fours), twice = times_three(once), thrice = times_three(twice);
        fours = _mm_blend_epi32(_mm_blend_epi32(fours, once, 2), _mm_blend_epi32(twice, thrice, 8), 12);
        w[7] = trits(join_halves(times_three(high_half(pair)), fours));
        const __m256 d = broadcast_f16(b.d);
#pragma GCC unroll 2
        for (int n = 0; n < num_x; n++) {
            __m256i dots[kBlocks];
#pragma GCC unroll 8
            for (int j = 0; j < kBlocks; j++)
                dots[j] = _mm256_maddubs_epi16(_mm256_set1_epi8(1), _mm256_sign_epi8(x[n].q[j], w[j]));
            const Dots sums = dots_of_lanes(transpose_add16(dots[0], dots[1], dots[2], dots[3]),
                                            transpose_add16(dots[4], dots[5], dots[6], dots[7]));
            out[n] = _mm256_mul_ps(d, _mm256_cvtepi32_ps(_mm256_add_epi32(sums.first, sums.last)));
        }
    }

  private:
    // -1, 0 or 1: below 86, below 171, from there on.
    TANDEM_INLINE static __m256i trits(__m256i q) {
        return _mm256_sub_epi8(_mm256_cmpgt_epi8(limit(171 - 128), q), _mm256_cmpgt_epi8(q, limit(85 - 128)));
    }
    // The compiler would make two instructions of each comparison with a constant that it knows.
    TANDEM_INLINE static __m256i limit(char value) {
        __m256i all = _mm256_set1_epi8(value);
        asm("" : "+x"(all));
        return all;
    }
};

}  // namespace
}  // namespace tandem::quant
