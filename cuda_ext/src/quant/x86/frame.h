// The common frame of the quantised types: decode a super-block once, multiply it by one or two input rows, add by the
// canonical trees. The file that includes it defines `dots` (below) for its instruction set.
#pragma once
#include "quant/row.h"
#include "quant/x86/decode.h"
#include "quant/x86/decode_blocks.h"
#include "quant/x86/decode_iq.h"
#include "quant/x86/decode_k.h"

namespace tandem::quant {
namespace {

// Sums of products of the first and of the last sixteen values of the eight blocks.
struct Dots {
    __m256i first, last;
};

TANDEM_INLINE __m256i add_mixed32(Mixed m) {
    return _mm256_add_epi32(m.straight, m.crossed);
}

// The int32 of each lane of a, b, c, d summed up: per lane [sum a, sum b, sum c, sum d].
TANDEM_INLINE __m256i transpose_add(__m256i a, __m256i b, __m256i c, __m256i d) {
    return add_mixed32(mix_quarters(add_mixed32(mix_halves(a, c)), add_mixed32(mix_halves(b, d))));
}

TANDEM_INLINE __m256i add_mixed16(Mixed m) {
    return _mm256_add_epi16(m.straight, m.crossed);
}
// transpose_add of int16 pairs, where sums of eight products still fit int16.
TANDEM_INLINE __m256i transpose_add16(__m256i a, __m256i b, __m256i c, __m256i d) {
    const Mixed all = mix_quarters(add_mixed16(mix_halves(a, c)), add_mixed16(mix_halves(b, d)));
    return _mm256_madd_epi16(add_mixed16(all), _mm256_set1_epi16(1));
}

// Per 128-bit lane one int32 of each of four blocks; lower lanes are of the first sixteen values.
TANDEM_INLINE Dots dots_of_lanes(__m256i blocks0123, __m256i blocks4567) {
    return {_mm256_permute2x128_si256(blocks0123, blocks4567, 0x20), _mm256_permute2x128_si256(blocks0123, blocks4567, 0x31)};
}

// The products, with weights that are larger by dot_offset<D>().
template <class D>
Dots dots(const Super& super, const ActGroup& x);
template <class D>
constexpr int dot_offset();

// Integer sums of the eight blocks as floats, integer scales applied where they are per sixteen values. All exact.
template <class D>
TANDEM_INLINE __m256 block_sums(const Super& super, const ActGroup& x, __m256i sum16) {
    const Dots p = dots<D>(super, x);
    constexpr int offset = dot_offset<D>();
    if constexpr (D::weights.halves) {
        __m256i first = p.first, last = p.last;
        if constexpr (offset != 0) {
            first = _mm256_sub_epi32(first, _mm256_madd_epi16(sum16, _mm256_set1_epi32(offset)));
            last = _mm256_sub_epi32(last, _mm256_madd_epi16(sum16, _mm256_set1_epi32(offset << 16)));
        }
        return _mm256_fmadd_ps(_mm256_cvtepi32_ps(last), super.scale[1], _mm256_mul_ps(_mm256_cvtepi32_ps(first), super.scale[0]));
    } else {
        __m256i sums = _mm256_add_epi32(p.first, p.last);
        if constexpr (offset != 0) sums = _mm256_sub_epi32(sums, _mm256_madd_epi16(sum16, _mm256_set1_epi16(offset)));
        return _mm256_cvtepi32_ps(sums);
    }
}

// The terms of the eight places of a super-block.
template <class T>
TANDEM_INLINE __m256 terms_of(const Super& super, const ActGroup& x) {
    using D = Decoder<T>;
    const __m256i sum16 = load256(x.sum16);
    __m256 value = block_sums<D>(super, x, sum16);
    if constexpr (T::has_minima) {
        const __m256i minima = _mm256_madd_epi16(sum16, D::weights.halves ? super.minima : _mm256_set1_epi16(1));
        value = _mm256_fmadd_ps(value, super.d, _mm256_mul_ps(super.m, _mm256_cvtepi32_ps(minima)));
    } else {
        value = _mm256_mul_ps(value, super.d);
    }
    return _mm256_mul_ps(_mm256_load_ps(x.d), value);
}

// Of eight vectors, `stride` apart.
template <int stride>
TANDEM_INLINE __m256 tree_of_term_vectors(const __m256* t) {
    const auto two = [t](int i) { return _mm256_add_ps(t[i * stride], t[(i + 1) * stride]); };
    return _mm256_add_ps(_mm256_add_ps(two(0), two(2)), _mm256_add_ps(two(4), two(6)));
}
TANDEM_INLINE float tree_of_place_vector(__m256 a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return add(_mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s))), 0.0f);
}

struct Row {
    const uint8_t* weights;
    int64_t num_values;
    const ActRow* x;
    int num_x;
    float* out;  // one value per input row, out_stride apart
    int64_t out_stride;
};

constexpr int64_t supers_of(int64_t num_values) {
    return (num_values + kSuper - 1) / kSuper;
}

template <class T>
constexpr int64_t kSuperBytes = kSuper / T::block_values * static_cast<int64_t>(sizeof(typename T::Block));

// Super-block `index` of a row. Where the row ends inside it, it is completed with zero blocks in `rest` [kSuperBytes<T>].
template <class T>
TANDEM_INLINE const uint8_t* super_at(const uint8_t* row, int64_t num_values, int64_t index, uint8_t* rest) {
    const int64_t left = num_values - index * kSuper;
    const uint8_t* super = row + index * kSuperBytes<T>;
    if (T::block_values == kSuper || left >= kSuper) return super;
    std::memset(rest, 0, kSuperBytes<T>);
    std::memcpy(rest, super, static_cast<size_t>(left / T::block_values) * sizeof(typename T::Block));
    return rest;
}

constexpr int64_t kAhead = 2048;  // bytes: what is fetched while a row is read

// Asks for a super-block of weights further on, in this row or the next one. Nothing is read that may not be.
template <class T>
TANDEM_INLINE void fetch_ahead(const uint8_t* row, int64_t super) {
    for (int64_t line = 0; line < kSuperBytes<T>; line += 64)
        _mm_prefetch(reinterpret_cast<const char*>(row + super * kSuperBytes<T> + kAhead + line), _MM_HINT_T0);
}

// `num_x` input rows from `first` on. terms(super-block's bytes, its index, out): the terms of its places for each of them.
template <class T, int num_x, class Terms>
TANDEM_INLINE void add_terms(const Row& row, int first, Terms terms_of_super) {
    const int64_t num_supers = supers_of(row.num_values);
    uint8_t rest[kSuperBytes<T>];
    __m256 places[num_x], terms[kTree][num_x];
    for (__m256& place : places) place = _mm256_setzero_ps();
    for (int64_t begin = 0; begin < num_supers; begin += kTree) {
        const int count = static_cast<int>(num_supers - begin < kTree ? num_supers - begin : kTree);
        for (int s = 0; s < count; s++) {
            fetch_ahead<T>(row.weights, begin + s);
            terms_of_super(super_at<T>(row.weights, row.num_values, begin + s, rest), begin + s, terms[s]);
        }
        for (int n = 0; n < num_x; n++) {
            // Without a loop of unknown length, of which the compiler would make a block fill that costs more than a super-block.
#pragma GCC unroll 8
            for (int s = 1; s < kTree; s++)
                if (s >= count) terms[s][n] = _mm256_setzero_ps();
            places[n] = _mm256_add_ps(places[n], tree_of_term_vectors<num_x>(&terms[0][n]));
        }
    }
    for (int n = 0; n < num_x; n++) row.out[(first + n) * row.out_stride] = tree_of_place_vector(places[n]);
}

template <class T, int num_x>
void dot_block_inputs(const Row& row, int first) {
    const ActRow* x = row.x + first;
    add_terms<T, num_x>(row, first, [x](const uint8_t* bytes, int64_t index, __m256* terms) {
        Super super;
        Decoder<T>::decode(bytes, super);
#pragma GCC unroll 4
        for (int n = 0; n < num_x; n++) terms[n] = terms_of<T>(super, x[n].groups[index]);
    });
}

template <class T>
void dot_block_row(const Row& row) {
    int x = 0;
    for (; x + 2 <= row.num_x; x += 2) dot_block_inputs<T, 2>(row, x);
    if (x < row.num_x) dot_block_inputs<T, 1>(row, x);
}

}  // namespace
}  // namespace tandem::quant
