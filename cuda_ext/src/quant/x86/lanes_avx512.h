// Registers of sixteen weight rows for tile_dot.h.
#pragma once
#include "quant/x86/tile_dot.h"

namespace tandem::quant {
namespace {

struct LanesAvx512 {
    using Int = __m512i;
    using Float = __m512;
    static constexpr int kLanes = 16;

    TANDEM_INLINE static Int load(const uint32_t* p) { return _mm512_load_si512(p); }
    TANDEM_INLINE static Float load(const float* p) { return _mm512_load_ps(p); }
    TANDEM_INLINE static Int broadcast(const int32_t* p) { return _mm512_set1_epi32(*p); }
    TANDEM_INLINE static Float broadcast(const float* p) { return _mm512_set1_ps(*p); }
    TANDEM_INLINE static Float zero() { return _mm512_setzero_ps(); }
    TANDEM_INLINE static Float to_float(Int v) { return _mm512_cvtepi32_ps(v); }
    TANDEM_INLINE static Float add(Float a, Float b) { return _mm512_add_ps(a, b); }
    TANDEM_INLINE static Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
    TANDEM_INLINE static Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
    TANDEM_INLINE static void store(float* p, Float v) { _mm512_storeu_ps(p, v); }

    TANDEM_INLINE static Float loose(const float* p) { return _mm512_loadu_ps(p); }
    TANDEM_INLINE static Float values(const F32::Block* p) { return loose(reinterpret_cast<const float*>(p)); }
    TANDEM_INLINE static Float values(const F16::Block* p) { return _mm512_cvtph_ps(load256(p)); }
    TANDEM_INLINE static Float values(const BF16::Block* p) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load256(p)), 16));
    }

    TANDEM_INLINE static Int words_of(const uint32_t* p) { return _mm512_set1_epi32(static_cast<int>(*p)); }

    // weights: [4][kTileRows]; values: the four words of each input.
    template <TileForm form, int num_x>
    TANDEM_INLINE static void add_half(const uint32_t (*weights)[kTileRows], int row, const uint32_t* const* values,
                                       Int (&sums)[kTileVectors][num_x]) {
        static_assert(form.words == 8);
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            const Int w[] = {load(weights[k] + row), load(weights[k] + row + kLanes)};
#pragma GCC unroll 8
            for (int x = 0; x < num_x; x++) {
                const Int q = words_of(values[x] + k);
#pragma GCC unroll 2
                for (int v = 0; v < kTileVectors; v++) sums[v][x] = _mm512_dpbusd_epi32(sums[v][x], w[v], q);
            }
        }
    }
};

}  // namespace
}  // namespace tandem::quant
