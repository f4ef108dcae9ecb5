// The row kernels for AVX-512 with VNNI: the instruction that multiplies and adds four bytes replaces the pair sums of AVX2 and
// has no range to mind; two blocks of a row share a register.
#ifdef TANDEM_X86
#include "quant/row_versions.h"
#include "quant/x86/decode_blocks_avx512.h"
#include "quant/x86/decode_books_avx512.h"
#include "quant/x86/lanes_avx512.h"
#include "quant/x86/turned_planes_avx512.h"

namespace tandem::quant {
namespace {

TANDEM_INLINE __m512i add_halves(__m512i a, __m512i b) {
    return _mm512_add_epi32(_mm512_mask_blend_epi32(0xcccc, a, b), _mm512_alignr_epi8(b, a, 8));
}
TANDEM_INLINE __m512i add_quarters(__m512i a, __m512i b) {
    const __m512i crossed = _mm512_shuffle_epi32(_mm512_mask_blend_epi32(0x5555, a, b), _MM_PERM_CDAB);
    return _mm512_add_epi32(_mm512_mask_blend_epi32(0xaaaa, a, b), crossed);
}

// Blocks 2 i and 2 i + 1.
template <class D>
TANDEM_INLINE __m512i two_blocks(const Super& super, int i) {
    if constexpr (D::weights.in_pairs) return _mm512_load_si512(super.w + 2 * i);
    const __m512i w = _mm512_inserti64x4(_mm512_castsi256_si512(super.w[2 * i]), super.w[2 * i + 1], 1);
    return D::weights.is_signed ? _mm512_xor_si512(w, _mm512_set1_epi8(-128)) : w;
}

template <class D>
constexpr int dot_offset() {
    return D::weights.is_signed ? 128 : D::weights.offset;
}

template <class D>
TANDEM_INLINE Dots dots(const Super& super, const ActGroup& x) {
    __m512i p[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        p[i] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), two_blocks<D>(super, i), _mm512_load_si512(x.q + 64 * i));
    // By 128-bit lane: first halves of the even blocks, their last halves, then the same of the odd blocks.
    const __m512i sums = add_quarters(add_halves(p[0], p[2]), add_halves(p[1], p[3]));
    const __m512i first = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m512i last = _mm512_setr_epi32(4, 12, 5, 13, 6, 14, 7, 15, 0, 0, 0, 0, 0, 0, 0, 0);
    return {_mm512_castsi512_si256(_mm512_permutexvar_epi32(first, sums)),
            _mm512_castsi512_si256(_mm512_permutexvar_epi32(last, sums))};
}

using Lanes = LanesAvx512;

template <class T>
constexpr TileForm tile_form() {
    return {.halves = Decoder<T>::weights.halves, .minima = T::has_minima, .words = 8, .pairs_in_int16 = 4};
}

template <class T>
constexpr int64_t tile_from() {
    return 3;
}

}  // namespace
}  // namespace tandem::quant

#include "quant/x86/kernels.h"

namespace tandem::quant {

const RowKernels kRowKernelsAvx512 = {quantise, quantise_place, dot, swiglu};

}  // namespace tandem::quant
#endif
