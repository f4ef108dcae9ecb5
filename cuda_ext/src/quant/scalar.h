// The scalar operations of the canonical arithmetic, each rounded once to nearest even, and the small number formats of GGUF.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "base/host_device.h"

#ifdef __CUDACC__
#include <cuda_fp16.h>
#endif

namespace tandem::quant {

#ifdef __CUDA_ARCH__
TANDEM_HD uint32_t float_bits(float x) {
    return __float_as_uint(x);
}
TANDEM_HD float bits_float(uint32_t x) {
    return __uint_as_float(x);
}
TANDEM_HD float add(float a, float b) {
    return __fadd_rn(a, b);
}
TANDEM_HD float mul(float a, float b) {
    return __fmul_rn(a, b);
}
TANDEM_HD float div(float a, float b) {
    return __fdiv_rn(a, b);
}
TANDEM_HD float fma(float a, float b, float c) {
    return __fmaf_rn(a, b, c);
}
#else
TANDEM_HD uint32_t float_bits(float x) {
    return std::bit_cast<uint32_t>(x);
}
TANDEM_HD float bits_float(uint32_t x) {
    return std::bit_cast<float>(x);
}
TANDEM_HD float add(float a, float b) {
    return a + b;
}
TANDEM_HD float mul(float a, float b) {
    return a * b;
}
TANDEM_HD float div(float a, float b) {
    return a / b;
}
TANDEM_HD float fma(float a, float b, float c) {
    return __builtin_fmaf(a, b, c);
}
#endif

TANDEM_HD uint16_t load_u16(const uint8_t* p) {
    return static_cast<uint16_t>(p[0] | p[1] << 8);
}
TANDEM_HD uint32_t load_u32(const uint8_t* p) {
    return load_u16(p) | static_cast<uint32_t>(load_u16(p + 2)) << 16;
}

// IEEE half precision; exact.
TANDEM_HD float f16_float(uint16_t bits) {
#ifdef __CUDA_ARCH__
    return __half2float(__ushort_as_half(bits));
#else
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
    const uint32_t exponent = (bits >> 10) & 31, mantissa = bits & 1023;
    if (exponent == 31) return bits_float(sign | 0x7f800000u | mantissa << 13);
    if (exponent == 0) return bits_float(sign | float_bits(static_cast<float>(mantissa) * 0x1p-24f));
    return bits_float(sign | (exponent + 112) << 23 | mantissa << 13);
#endif
}
TANDEM_HD bool f16_finite(uint16_t bits) {
    return (bits & 0x7c00) != 0x7c00;
}
TANDEM_HD float load_f16(const uint8_t* p) {
    return f16_float(load_u16(p));
}
TANDEM_HD bool finite_f16(const uint8_t* p) {
    return f16_finite(load_u16(p));
}

// E8M0 of the OCP microscaling formats, halved because the FP4 values of GGUF are doubled: 2^(e - 128). 255 is NaN there.
TANDEM_HD float e8m0_half_float(uint8_t e) {
    return bits_float(e < 2 ? 0x00200000u << e : static_cast<uint32_t>(e - 1) << 23);
}

// Unsigned E4M3, halved likewise, as an integer number of 2^-10. The NaN pattern 0x7f reads as zero, as GGUF's own reader has it.
TANDEM_HD int ue4m3_units(uint8_t x) {
    if (x == 0x7f) return 0;
    const int exponent = (x >> 3) & 15, mantissa = x & 7;
    return exponent == 0 ? mantissa : (8 + mantissa) << (exponent - 1);
}

}  // namespace tandem::quant
