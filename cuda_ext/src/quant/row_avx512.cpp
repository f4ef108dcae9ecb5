// The row kernels for AVX-512 with VNNI, on 256-bit vectors: the instruction that multiplies and adds four bytes replaces
// the pair sums of AVX2 and has no range to mind.
#ifdef TANDEM_X86
#include "quant/row_versions.h"
#include "quant/x86/kernels.h"

namespace tandem::quant {
namespace {

template <class D>
TANDEM_INLINE Dots dots(const Super& super, const ActGroup& x) {
    __m256i p[kBlocks];
#pragma GCC unroll 8
    for (int j = 0; j < kBlocks; j++) {
        const __m256i q = _mm256_load_si256(reinterpret_cast<const __m256i*>(x.q + kBlock * j));
        const __m256i w = super.w[j];
        if constexpr (D::weights.is_signed)
            p[j] = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_abs_epi8(w), _mm256_sign_epi8(q, w));
        else
            p[j] = _mm256_dpbusd_epi32(_mm256_setzero_si256(), w, q);
    }
    return {transpose_add(p[0], p[1], p[2], p[3]), transpose_add(p[4], p[5], p[6], p[7])};
}

}  // namespace

const RowKernels kRowKernelsAvx512 = {quantise, dot, swiglu};

}  // namespace tandem::quant
#endif
