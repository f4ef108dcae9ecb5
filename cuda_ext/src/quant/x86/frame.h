// The common frame of the quantised types: decode a super-block once, multiply it by up to eight input rows, add by the
// canonical trees. The file that includes it defines `dots` (below) for its instruction set.
#pragma once
#include "quant/row.h"
#include "quant/x86/decode.h"
#include "quant/x86/decode_blocks.h"
#include "quant/x86/decode_iq.h"
#include "quant/x86/decode_k.h"

namespace tandem::quant {
namespace {

constexpr int kInputs = 8;  // input rows that share one decoding of the weights

// Products of a super-block's weights with its activations, summed over four of sixteen values: in each 128-bit lane one int32
// per block, the lower lane for the first sixteen values of the blocks, the upper lane for the last sixteen.
struct Dots {
    __m256i blocks0123, blocks4567;
};

TANDEM_INLINE __m256i add_mixed32(Mixed m) {
    return _mm256_add_epi32(m.straight, m.crossed);
}

// The int32 of each lane of a, b, c, d summed up: per lane [sum a, sum b, sum c, sum d].
TANDEM_INLINE __m256i transpose_add(__m256i a, __m256i b, __m256i c, __m256i d) {
    return add_mixed32(mix_quarters(add_mixed32(mix_halves(a, c)), add_mixed32(mix_halves(b, d))));
}

template <class D>
Dots dots(const Super& super, const ActGroup& x);

// Integer sums of the eight blocks as floats, integer scales applied where they are per sixteen values. All exact.
template <class D>
TANDEM_INLINE __m256 block_sums(const Super& super, const ActGroup& x, __m256i sum16) {
    const Dots p = dots<D>(super, x);
    if constexpr (D::weights.halves) {
        __m256i first = join_halves(low_half(p.blocks0123), low_half(p.blocks4567));
        __m256i last = join_halves(high_half(p.blocks0123), high_half(p.blocks4567));
        if constexpr (D::weights.offset != 0) {
            first = _mm256_sub_epi32(first, _mm256_madd_epi16(sum16, _mm256_set1_epi32(D::weights.offset)));
            last = _mm256_sub_epi32(last, _mm256_madd_epi16(sum16, _mm256_set1_epi32(D::weights.offset << 16)));
        }
        return _mm256_fmadd_ps(_mm256_cvtepi32_ps(last), super.scale[1], _mm256_mul_ps(_mm256_cvtepi32_ps(first), super.scale[0]));
    } else {
        __m256i sums = join_halves(_mm_add_epi32(low_half(p.blocks0123), high_half(p.blocks0123)),
                                   _mm_add_epi32(low_half(p.blocks4567), high_half(p.blocks4567)));
        if constexpr (D::weights.offset != 0)
            sums = _mm256_sub_epi32(sums, _mm256_madd_epi16(sum16, _mm256_set1_epi16(D::weights.offset)));
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

TANDEM_INLINE __m256 tree_of_term_vectors(const __m256* t) {
    return _mm256_add_ps(_mm256_add_ps(_mm256_add_ps(t[0], t[1]), _mm256_add_ps(t[2], t[3])),
                         _mm256_add_ps(_mm256_add_ps(t[4], t[5]), _mm256_add_ps(t[6], t[7])));
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
    int num_x;   // up to kInputs
    float* out;  // one value per input row, out_stride apart
    int64_t out_stride;
};

// A row's super-blocks; the last one is completed with zero blocks where the row ends inside it.
template <class T>
class Supers {
  public:
    explicit Supers(const Row& row) : row_(row.weights), whole_(row.num_values / kSuper) {
        const int64_t rest = row.num_values % kSuper / T::block_values;
        count_ = whole_ + (rest > 0 ? 1 : 0);
        if (rest == 0) return;
        std::memset(last_, 0, kBytes);
        std::memcpy(last_, row_ + whole_ * kBytes, static_cast<size_t>(rest) * sizeof(typename T::Block));
    }
    int64_t count() const { return count_; }
    const uint8_t* operator[](int64_t s) const { return s < whole_ ? row_ + s * kBytes : last_; }

  private:
    static constexpr int64_t kBytes = kSuper / T::block_values * static_cast<int64_t>(sizeof(typename T::Block));
    const uint8_t* row_;
    int64_t whole_, count_;
    uint8_t last_[kBytes];
};

template <class T>
void dot_block_row(const Row& row) {
    const Supers<T> supers(row);
    __m256 places[kInputs], terms[kInputs][kTree];
    for (int x = 0; x < row.num_x; x++) places[x] = _mm256_setzero_ps();
    for (int64_t begin = 0; begin < supers.count(); begin += kTree) {
        const int count = static_cast<int>(supers.count() - begin < kTree ? supers.count() - begin : kTree);
        for (int s = 0; s < count; s++) {
            Super super;
            Decoder<T>::decode(supers[begin + s], super);
            for (int x = 0; x < row.num_x; x++) terms[x][s] = terms_of<T>(super, row.x[x].groups[begin + s]);
        }
        for (int x = 0; x < row.num_x; x++) {
            for (int s = count; s < kTree; s++) terms[x][s] = _mm256_setzero_ps();
            places[x] = _mm256_add_ps(places[x], tree_of_term_vectors(terms[x]));
        }
    }
    for (int x = 0; x < row.num_x; x++) row.out[x * row.out_stride] = tree_of_place_vector(places[x]);
}

}  // namespace
}  // namespace tandem::quant
