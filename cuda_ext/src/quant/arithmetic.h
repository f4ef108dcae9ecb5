// The canonical arithmetic, scalar: every other version gives the same bits. docs/arithmetic.md says it in words.
// Compile without contraction, reassociation, flush-to-zero or another rounding mode.
#pragma once
#include "quant/block32.h"
#include "quant/row.h"

namespace tandem::quant {

constexpr int kBlock = 32;                  // values that share an activation scale
constexpr int kBlocks = 8;                  // such blocks in a super-block (an ActGroup)
constexpr int kSuper = kBlock * kBlocks;    // values of a super-block
constexpr int kTree = 8;                    // super-blocks whose terms are added as a tree
constexpr uint32_t kTiny = 0x0d800000;      // 2^-100: a block without a larger value is zero
constexpr uint32_t kInfinity = 0x7f800000;  // bits of magnitudes from here on are not finite
constexpr uint32_t kNan = 0x7fc00000;
constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds |x| < 2^22 to an integer, ties to even
constexpr uint32_t kRoundBits = 0x4b400000;

TANDEM_HD int round_int(float x) {
    return static_cast<int>(float_bits(add(x, kRound)) - float_bits(kRound));
}

// ---- activations ----

struct BlockScales {
    float d;        // of the quantised block
    float inverse;  // multiplies the values
};

// `amax`: bits of the largest magnitude. A value that is not finite makes the block's scale NaN and its weights zero.
TANDEM_HD BlockScales block_scales(uint32_t amax, float row_scale) {
    if (amax < kTiny) return {0.0f, 0.0f};
    if (amax >= kInfinity) return {bits_float(kNan), 0.0f};
    return {mul(div(bits_float(amax), 127.0f), row_scale), div(127.0f, bits_float(amax))};
}

TANDEM_HD void quantise_block(const float* x, float row_scale, ActGroup& out, int j) {
    uint32_t amax = 0;
    for (int i = 0; i < kBlock; i++) {
        const uint32_t magnitude = float_bits(x[i]) & 0x7fffffff;
        amax = magnitude > amax ? magnitude : amax;
    }
    const BlockScales scales = block_scales(amax, row_scale);
    out.d[j] = scales.d;
    int sum[2] = {0, 0};
    for (int i = 0; i < kBlock; i++) {
        const int q = scales.inverse == 0.0f ? 0 : round_int(mul(x[i], scales.inverse));
        out.q[kBlock * j + i] = static_cast<int8_t>(q);
        sum[i / 16] += q;
    }
    for (int h = 0; h < 2; h++) out.sum16[2 * j + h] = static_cast<int16_t>(sum[h]);
}

// ---- rows of quantised weights ----

// The value of a block of 32: round(d * sum of scale * w * q), with minima round(that + round(m * sum of minimum * q)).
// The sums are exact; only NVFP4's exceeds 24 bits, and there d is a power of two, so one rounding remains.
template <bool has_minima>
TANDEM_HD float block_value(const Block32& weights, const int8_t* q, const int16_t* sum16) {
    int dot[2] = {0, 0};
    for (int i = 0; i < kBlock; i++) dot[i / 16] += weights.w[i] * q[i];
    const int64_t scaled = static_cast<int64_t>(weights.scale[0]) * dot[0] + static_cast<int64_t>(weights.scale[1]) * dot[1];
    if constexpr (has_minima) {
        const int minima = weights.minimum[0] * sum16[0] + weights.minimum[1] * sum16[1];
        return fma(weights.d, static_cast<float>(scaled), mul(weights.m, static_cast<float>(minima)));
    } else {
        return mul(weights.d, static_cast<float>(scaled));
    }
}

// Terms of one place in up to eight super-blocks; missing ones are zero.
TANDEM_HD float tree_of_terms(const float* t) {
    return add(add(add(t[0], t[1]), add(t[2], t[3])), add(add(t[4], t[5]), add(t[6], t[7])));
}
// The eight places of a row. A zero is always +0.
TANDEM_HD float tree_of_places(const float* a) {
    return add(add(add(add(a[0], a[4]), add(a[2], a[6])), add(add(a[1], a[5]), add(a[3], a[7]))), 0.0f);
}

// ---- rows of F32, F16, BF16: 32 sums by fma, then a tree ----

TANDEM_HD float tree_of_lanes(float* sums) {
    for (int width = kBlock / 2; width >= 1; width /= 2)
        for (int i = 0; i < width; i++) sums[i] = add(sums[i], sums[i + width]);
    return add(sums[0], 0.0f);
}

// ---- activation function ----

constexpr float kExpLog2e = 1.44269504f;
constexpr float kExpLn2High = 0.693359375f;    // few bits: n * this is exact
constexpr float kExpLn2Low = -2.12194440e-4f;  // ln 2 less that
TANDEM_TABLE float kExpPoly[6] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                                  4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};

// exp of x clamped to [-87, 88]; relative error at most 1.2e-7. Cody and Waite's reduction by ln 2 in two parts, then a polynomial.
TANDEM_HD float exp_clamped(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    const float shifted = fma(x, kExpLog2e, kRound);  // n is in its lowest bits
    const float n = add(shifted, -kRound);
    const float r = fma(n, -kExpLn2Low, fma(n, -kExpLn2High, x));
    float p = kExpPoly[0];
    for (int i = 1; i < 6; i++) p = fma(p, r, kExpPoly[i]);
    p = fma(p, mul(r, r), add(r, 1.0f));
    const uint32_t exponent = float_bits(shifted) - kRoundBits + 127;
    return mul(p, bits_float(exponent << 23));
}
TANDEM_HD float swiglu_value(float gate, float up) {
    return mul(div(gate, add(1.0f, exp_clamped(-gate))), up);
}

}  // namespace tandem::quant
