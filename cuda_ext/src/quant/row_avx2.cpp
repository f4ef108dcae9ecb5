// The row kernels for AVX2, FMA and F16C.
#ifdef TANDEM_X86
#include <type_traits>

#include "quant/row_versions.h"
#include "quant/x86/decode_blocks_avx2.h"
#include "quant/x86/decode_books_avx2.h"
#include "quant/x86/decode_k_avx2.h"
#include "quant/x86/lanes_avx2.h"
#include "quant/x86/turned_fours_avx2.h"

namespace tandem::quant {
namespace {

// Sums of two products in sixteen int16; |weights| * 127 * 2 fits.
template <class D>
TANDEM_INLINE __m256i pairs(const Super& super, const ActGroup& x, int j) {
    const __m256i q = _mm256_load_si256(reinterpret_cast<const __m256i*>(x.q + kBlock * j));
    const __m256i w = super.w[j];
    if constexpr (D::weights.is_signed) return _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(q, w));
    return _mm256_maddubs_epi16(w, q);
}

TANDEM_INLINE __m256i add_large(__m256i a, __m256i b, __m256i c, __m256i d) {
    const __m256i one = _mm256_set1_epi16(1);
    return transpose_add(_mm256_madd_epi16(a, one), _mm256_madd_epi16(b, one), _mm256_madd_epi16(c, one),
                         _mm256_madd_epi16(d, one));
}

template <class D>
TANDEM_INLINE Dots dots(const Super& super, const ActGroup& x) {
    __m256i p[kBlocks];
#pragma GCC unroll 8
    for (int j = 0; j < kBlocks; j++) p[j] = pairs<D>(super, x, j);
    if constexpr (8 * 127 * D::weights.largest <= 32767)
        return dots_of_lanes(transpose_add16(p[0], p[1], p[2], p[3]), transpose_add16(p[4], p[5], p[6], p[7]));
    return dots_of_lanes(add_large(p[0], p[1], p[2], p[3]), add_large(p[4], p[5], p[6], p[7]));
}
template <class D>
constexpr int dot_offset() {
    return D::weights.offset;
}

using Lanes = LanesAvx2;

// Sums of unsigned bytes in int16, else the true weights in int16.
template <class T>
constexpr TileForm tile_form() {
    constexpr Weights weights = Decoder<T>::weights;
    constexpr int pairs = 32767 / (2 * 127 * weights.largest);
    constexpr bool wide = weights.is_signed || pairs == 0;
    return {.halves = weights.halves,
            .minima = T::has_minima,
            .words = wide ? 16 : 8,
            .pairs_in_int16 = pairs >= 4   ? 4
                              : pairs >= 2 ? 2
                                           : 1};
}

// Measured on Zen 3, Q2_K and TQ2_0 on an Intel Xeon: where weights are quickly decoded, decoding them again for every two input
// rows is long the cheaper way.
template <class T>
constexpr int64_t tile_from() {
    if constexpr (std::is_same_v<T, IQ3_S>) return 3;
    if constexpr (std::is_same_v<T, Q6_K> || std::is_same_v<T, Q8_0>) return 12;
    if constexpr (std::is_same_v<T, TQ2_0>) return 16;
    if constexpr (std::is_same_v<T, Q2_K>) return 32;
    return 8;
}

}  // namespace
}  // namespace tandem::quant

#include "quant/x86/kernels.h"

namespace tandem::quant {

const RowKernels kRowKernelsAvx2 = {quantise, quantise_place, dot, swiglu};

}  // namespace tandem::quant
#endif
