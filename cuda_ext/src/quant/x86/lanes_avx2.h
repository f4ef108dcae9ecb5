// Registers of eight weight rows for tile_dot.h.
#pragma once
#include "quant/x86/tile_dot.h"

namespace tandem::quant {
namespace {

struct LanesAvx2 {
    using Int = __m256i;
    using Float = __m256;
    static constexpr int kLanes = 8;

    TANDEM_INLINE static Int load(const uint32_t* p) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(p)); }
    TANDEM_INLINE static Float load(const float* p) { return _mm256_load_ps(p); }
    TANDEM_INLINE static Int broadcast(const int32_t* p) { return _mm256_set1_epi32(*p); }
    TANDEM_INLINE static Float broadcast(const float* p) { return _mm256_broadcast_ss(p); }
    TANDEM_INLINE static Float zero() { return _mm256_setzero_ps(); }
    TANDEM_INLINE static Float to_float(Int v) { return _mm256_cvtepi32_ps(v); }
    TANDEM_INLINE static Float add(Float a, Float b) { return _mm256_add_ps(a, b); }
    TANDEM_INLINE static Float mul(Float a, Float b) { return _mm256_mul_ps(a, b); }
    TANDEM_INLINE static Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
    TANDEM_INLINE static void store(float* p, Float v) { _mm256_storeu_ps(p, v); }

    TANDEM_INLINE static Float loose(const float* p) { return _mm256_loadu_ps(p); }
    TANDEM_INLINE static Float values(const F32::Block* p) { return loose(reinterpret_cast<const float*>(p)); }
    TANDEM_INLINE static Float values(const F16::Block* p) { return _mm256_cvtph_ps(load128(p)); }
    TANDEM_INLINE static Float values(const BF16::Block* p) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load128(p)), 16));
    }

    TANDEM_INLINE static Int words_of(const uint32_t* p) { return _mm256_set1_epi32(static_cast<int>(*p)); }

    // weights: [words of a half][kTileRows]; values: a half's words of each input.
    template <TileForm form, int num_x>
    TANDEM_INLINE static void add_half(const uint32_t (*weights)[kTileRows], int row, const uint32_t* const* values,
                                       Int (&sums)[kTileVectors][num_x]) {
        if constexpr (form.words == 16)
            add_wide(weights, row, values, sums);
        else
            add_bytes<form.pairs_in_int16>(weights, row, values, sums);
    }

  private:
    // The compiler would add all products in a tree, and keep them in memory for that.
    TANDEM_INLINE static void keep(Int& sum) { asm("" : "+x"(sum)); }

    template <int num_x>
    TANDEM_INLINE static void add_wide(const uint32_t (*weights)[kTileRows], int row, const uint32_t* const* values,
                                       Int (&sums)[kTileVectors][num_x]) {
#pragma GCC unroll 8
        for (int k = 0; k < 8; k++) {
            const Int w[] = {load(weights[k] + row), load(weights[k] + row + kLanes)};
#pragma GCC unroll 8
            for (int x = 0; x < num_x; x++) {
                const Int q = words_of(values[x] + k);
#pragma GCC unroll 2
                for (int v = 0; v < kTileVectors; v++) {
                    sums[v][x] = _mm256_add_epi32(sums[v][x], _mm256_madd_epi16(w[v], q));
                    keep(sums[v][x]);
                }
            }
        }
    }

    template <int pairs, int num_x>
    TANDEM_INLINE static void add_bytes(const uint32_t (*weights)[kTileRows], int row, const uint32_t* const* values,
                                        Int (&sums)[kTileVectors][num_x]) {
        const Int one = _mm256_set1_epi16(1);
        Int part[kTileVectors][num_x];
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            const Int w[] = {load(weights[k] + row), load(weights[k] + row + kLanes)};
#pragma GCC unroll 8
            for (int x = 0; x < num_x; x++) {
                const Int q = words_of(values[x] + k);
#pragma GCC unroll 2
                for (int v = 0; v < kTileVectors; v++) {
                    const Int products = _mm256_maddubs_epi16(w[v], q);
                    part[v][x] = k % pairs == 0 ? products : _mm256_add_epi16(part[v][x], products);
                    keep(part[v][x]);
                    if (k % pairs == pairs - 1) sums[v][x] = _mm256_add_epi32(sums[v][x], _mm256_madd_epi16(part[v][x], one));
                }
            }
        }
    }
};

}  // namespace
}  // namespace tandem::quant
