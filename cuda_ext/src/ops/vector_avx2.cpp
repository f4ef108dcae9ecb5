#ifdef TANDEM_X86
#include <immintrin.h>

#include "ops/vector_impl.h"

namespace tandem {
namespace {

struct Avx2Lanes {
    static constexpr int kWidth = 8;
    static constexpr int kVecs = 2;
    using Vec = __m256;

    static Vec load(const float* x) { return _mm256_loadu_ps(x); }
    static Vec load(const uint16_t* x) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))); }
    static Vec load(const int8_t* x) {
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x))));
    }
    static void store(float* out, Vec x) { _mm256_storeu_ps(out, x); }
    static Vec set1(float x) { return _mm256_set1_ps(x); }
    static Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
    static Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
    static Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
    static Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
    static Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
    static Vec pow2(Vec n) {
        const __m256i biased = _mm256_add_epi32(_mm256_cvttps_epi32(n), _mm256_set1_epi32(127));
        return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
    }

    struct Wholes {
        __m256i low = _mm256_setzero_si256(), high = _mm256_setzero_si256();

        void add(Vec x) {
            low = _mm256_add_epi64(low, whole(_mm256_castps256_ps128(x)));
            high = _mm256_add_epi64(high, whole(_mm256_extractf128_ps(x, 1)));
        }
        void store(int64_t* out) const {
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), low);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 4), high);
        }
        // Beside 1.5 * 2^52 a double's last bit counts ones.
        static __m256i whole(__m128 x) {
            const __m256d magic = _mm256_set1_pd(6755399441055744.0);
            return _mm256_sub_epi64(_mm256_castpd_si256(_mm256_add_pd(_mm256_cvtps_pd(x), magic)), _mm256_castpd_si256(magic));
        }
    };
};

void narrow(const float* x, int64_t num, uint16_t* out) {
    int64_t i = 0;
    for (; i + 8 <= num; i += 8)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
    for (; i < num; i++) out[i] = _cvtss_sh(x[i], _MM_FROUND_TO_NEAREST_INT);
}

using Avx2 = Kernels<Avx2Lanes>;

}  // namespace

const VectorKernels kVectorAvx2{Avx2::add_scaled, Avx2::merge_scaled, Avx2::exp_below,    Avx2::attend_tile, Avx2::widen,
                                narrow,           Avx2::widen_keys,   Avx2::widen_values, Avx2::router_sums};

}  // namespace tandem
#endif
