// Quantising activations and the activation function, eight values at a time.
#pragma once
#include "quant/x86/vectors.h"

namespace tandem::quant {
namespace {

TANDEM_INLINE uint32_t largest_of(__m256i v) {
    __m128i m = _mm_max_epi32(low_half(v), high_half(v));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(m));
}

TANDEM_INLINE int16_t sum_of(__m256i v) {
    __m128i s = _mm_add_epi32(low_half(v), high_half(v));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1));
    return static_cast<int16_t>(_mm_cvtsi128_si32(s));
}

TANDEM_INLINE void quantise_block_vector(const float* x, float row_scale, ActGroup& out, int j) {
    __m256 v[4];
    __m256i magnitude = _mm256_setzero_si256();
    for (int i = 0; i < 4; i++) {
        v[i] = _mm256_loadu_ps(x + 8 * i);
        magnitude = _mm256_max_epi32(magnitude, _mm256_and_si256(_mm256_castps_si256(v[i]), _mm256_set1_epi32(0x7fffffff)));
    }
    const BlockScales scales = block_scales(largest_of(magnitude), row_scale);
    out.d[j] = scales.d;
    __m256i q[4];
    if (scales.inverse == 0.0f) {
        _mm256_store_si256(reinterpret_cast<__m256i*>(out.q + kBlock * j), _mm256_setzero_si256());
        out.sum16[2 * j] = out.sum16[2 * j + 1] = 0;
        return;
    }
    for (int i = 0; i < 4; i++) q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], _mm256_set1_ps(scales.inverse)));
    const __m256i lanes = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
    const __m256i natural = _mm256_permutevar8x32_epi32(lanes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_store_si256(reinterpret_cast<__m256i*>(out.q + kBlock * j), natural);
    out.sum16[2 * j] = sum_of(_mm256_add_epi32(q[0], q[1]));
    out.sum16[2 * j + 1] = sum_of(_mm256_add_epi32(q[2], q[3]));
}

void quantise(const float* x, int64_t num_values, float row_scale, ActGroup* out) {
    const int64_t num_blocks = num_values / kBlock;
    for (int64_t b = 0; b < num_blocks; b++) {
        ActGroup& group = out[b / kBlocks];
        if (b % kBlocks == 0) group = ActGroup{};
        quantise_block_vector(x + b * kBlock, row_scale, group, static_cast<int>(b % kBlocks));
    }
}

void quantise_place(const float* x, float row_scale, ActGroup* out, int place) {
    quantise_block_vector(x, row_scale, *out, place);
}

TANDEM_INLINE __m256 exp_clamped_vector(__m256 x) {  // exp_clamped, lane by lane
    x = _mm256_min_ps(_mm256_set1_ps(88.0f), _mm256_max_ps(_mm256_set1_ps(-87.0f), x));
    const __m256 round = _mm256_set1_ps(kRound);
    const __m256 shifted = _mm256_fmadd_ps(x, _mm256_set1_ps(kExpLog2e), round);
    const __m256 n = _mm256_sub_ps(shifted, round);
    const __m256 r = _mm256_fmadd_ps(n, _mm256_set1_ps(-kExpLn2Low), _mm256_fmadd_ps(n, _mm256_set1_ps(-kExpLn2High), x));
    __m256 p = _mm256_set1_ps(kExpPoly[0]);
    for (int i = 1; i < 6; i++) p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(kExpPoly[i]));
    p = _mm256_fmadd_ps(p, _mm256_mul_ps(r, r), _mm256_add_ps(r, _mm256_set1_ps(1.0f)));
    const __m256i exponent = _mm256_sub_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(kRoundBits - 127));
    return _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}

void swiglu(const float* gate, const float* up, int64_t num_values, float* out) {
    int64_t i = 0;
    for (; i + 8 <= num_values; i += 8) {
        const __m256 g = _mm256_loadu_ps(gate + i);
        const __m256 e = exp_clamped_vector(_mm256_xor_ps(g, _mm256_set1_ps(-0.0f)));
        const __m256 silu = _mm256_div_ps(g, _mm256_add_ps(_mm256_set1_ps(1.0f), e));
        _mm256_storeu_ps(out + i, _mm256_mul_ps(silu, _mm256_loadu_ps(up + i)));
    }
    for (; i < num_values; i++) out[i] = swiglu_value(gate[i], up[i]);
}

}  // namespace
}  // namespace tandem::quant
