#ifdef TANDEM_X86
#include <immintrin.h>

#include "ops/vector_impl.h"

namespace tandem {
namespace {

struct Avx512Lanes {
    static constexpr int kWidth = 16;
    static constexpr int kVecs = 4;
    using Vec = __m512;

    static Vec load(const float* x) { return _mm512_loadu_ps(x); }
    static Vec load(const uint16_t* x) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))); }
    static Vec load(const int8_t* x) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))));
    }
    static void store(float* out, Vec x) { _mm512_storeu_ps(out, x); }
    static Vec set1(float x) { return _mm512_set1_ps(x); }
    static Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
    static Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
    static Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
    static Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
    static Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
    static Vec pow2(Vec n) {
        const __m512i biased = _mm512_add_epi32(_mm512_cvttps_epi32(n), _mm512_set1_epi32(127));
        return _mm512_castsi512_ps(_mm512_slli_epi32(biased, 23));
    }

    struct Wholes {
        __m512i low = _mm512_setzero_si512(), high = _mm512_setzero_si512();

        void add(Vec x) {
            low = _mm512_add_epi64(low, _mm512_cvtps_epi64(_mm512_castps512_ps256(x)));
            high = _mm512_add_epi64(high, _mm512_cvtps_epi64(_mm512_extractf32x8_ps(x, 1)));
        }
        void store(int64_t* out) const {
            _mm512_storeu_si512(out, low);
            _mm512_storeu_si512(out + 8, high);
        }
    };
};

void narrow(const float* x, int64_t num, uint16_t* out) {
    int64_t i = 0;
    for (; i + 16 <= num; i += 16)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i),
                            _mm512_cvtps_ph(_mm512_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
    for (; i < num; i++) out[i] = _cvtss_sh(x[i], _MM_FROUND_TO_NEAREST_INT);
}

using Avx512 = Kernels<Avx512Lanes>;

}  // namespace

const VectorKernels kVectorAvx512{Avx512::add_scaled,  Avx512::merge_scaled, Avx512::exp_below,
                                  Avx512::attend_tile, Avx512::widen,        narrow,
                                  Avx512::widen_keys,  Avx512::widen_values, Avx512::router_sums};

}  // namespace tandem
#endif
