// Weights of every type as halves for the tensor cores.
//
// A half is weight * 2^kHalfShift, so that small scales stay clear of half precision's subnormals; |weight| up to 1,023 fits,
// beyond is infinite. Scale and minimum of a block (the products d * s and m * n) are rounded to halves, then w * scale + minimum
// is rounded once: three relative errors of at most 2^-11, of the scaled weight, of the minimum and of their sum.
#pragma once
#include <cuda_fp16.h>

#include <type_traits>

#include "quant/arithmetic.h"
#include "quant/packed/all.cuh"

namespace tandem::quant {

constexpr int kHalfShift = 6;
constexpr float kHalfFactor = 1 << kHalfShift;
constexpr float kHalfInverse = 1.0f / kHalfFactor;

// Weights 8 i .. 8 i + 7 are in chunk i, lower half of a word first.
struct HalfBlock {
    uint4 chunk[4];
};

namespace detail {

__device__ __forceinline__ __half2 word_halves(uint32_t word) {
    __half2 halves;
    memcpy(&halves, &word, sizeof halves);
    return halves;
}
__device__ __forceinline__ uint32_t halves_word(__half2 halves) {
    uint32_t word;
    memcpy(&word, &halves, sizeof word);
    return word;
}

// Eight words from an even address on, nine loads for all of them: here the words of a block are wanted by one thread.
__device__ __forceinline__ void load_eight_words(const uint8_t* p, uint32_t (&w)[8]) {
    const auto past = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(p) & 3);
    const auto* words = reinterpret_cast<const uint32_t*>(p - past);
    uint32_t low = words[0];
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const uint32_t high = words[k + 1];
        w[k] = __funnelshift_r(low, high, 8 * past);
        low = high;
    }
}

// All words of a block of 32, as Packed<T>::words has them.
template <class T>
__device__ __forceinline__ void block_words(const uint8_t* b, int j, const uint8_t* table, uint32_t (&w)[8]) {
    if constexpr (std::is_same_v<T, Q6_K> || std::is_same_v<T, Q3_K>) {
        constexpr bool six = std::is_same_v<T, Q6_K>;  // four lower and two upper bits; else two and one
        const int low_shift = six ? 4 * (j % 4 / 2) : 2 * (j % 4), high_shift = six ? 2 * (j % 4) : j;
        uint32_t low[8], high[8];
        load_eight_words(six ? b + 64 * (j / 4) + 32 * (j % 2) : b + 32 + 32 * (j / 4), low);
        load_eight_words(six ? b + 128 + 32 * (j / 4) : b, high);
#pragma unroll
        for (int k = 0; k < 8; k++)
            w[k] = ((low[k] >> low_shift) & (six ? kLowNibbles : kLowPairs)) |
                   ((high[k] >> high_shift) & (six ? kLowPairs : kLowBits)) << (six ? 4 : 2);
    } else {
        Packed<T>::words(b, j, table, w);
    }
}

// Scale and minimum of sixteen weights for the integers of Packed<T>.
struct HalfScales {
    __half2 scale, minimum;
};

template <class T>
__device__ __forceinline__ HalfScales half_scales(const PackedScale& s, int h) {
    using P = Packed<T>;
    const __half2 scale = __float2half2_rn(mul(mul(s.d, static_cast<float>(s.scale[h])), kHalfFactor));
    if constexpr (T::has_minima)
        return {scale, __float2half2_rn(mul(mul(s.m, static_cast<float>(s.minimum[h])), kHalfFactor))};
    else if constexpr (P::kFactor == 2)  // 2 w - offset: both products are exact
        return {__hadd2(scale, scale), __hmul2(scale, __float2half2_rn(-P::kOffset))};
    else
        return {scale, scale};
}

// Four packed bytes as halves.
template <class T>
__device__ __forceinline__ uint2 scaled_halves(uint32_t bytes, const HalfScales& s) {
    using P = Packed<T>;
    constexpr bool with_minimum = T::has_minima || P::kFactor == 2;
    constexpr bool is_signed = !T::has_minima && P::kOffset <= 0;
    // A byte under 0x64 is the half 1024 + byte; taking 1024 away again is exact.
    const uint32_t biased = is_signed ? bytes ^ 0x80808080 : bytes;
    const __half2 bias = __float2half2_rn(1024.0f + (is_signed ? 128 : 0) + (with_minimum ? 0 : P::kOffset));
    uint32_t words[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t magic = __byte_perm(biased, 0x64646464, i == 0 ? 0x4140 : 0x4342);
        const __half2 integers = __hsub2(word_halves(magic), bias);
        words[i] = halves_word(with_minimum ? __hfma2(integers, s.scale, s.minimum) : __hmul2(integers, s.scale));
    }
    return {words[0], words[1]};
}

template <class T>
__device__ __forceinline__ HalfBlock halves_of_block(const uint8_t* block, int j, const uint8_t* table) {
    using P = Packed<T>;
    const PackedScale scale = P::scale(block, j);
    const HalfScales scales[2] = {half_scales<T>(scale, 0), half_scales<T>(scale, P::kHalves ? 1 : 0)};
    uint32_t words[8];
    block_words<T>(block, j, table, words);
    HalfBlock out;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint2 low = scaled_halves<T>(words[2 * i], scales[i / 2]), high = scaled_halves<T>(words[2 * i + 1], scales[i / 2]);
        out.chunk[i] = {low.x, low.y, high.x, high.y};
    }
    return out;
}

// ---- F32, F16, BF16: rows are aligned to 16 bytes ----

__device__ __forceinline__ uint32_t scaled_pair(uint32_t low_bits, uint32_t high_bits) {  // of floats
    return halves_word(__floats2half2_rn(mul(bits_float(low_bits), kHalfFactor), mul(bits_float(high_bits), kHalfFactor)));
}
template <class T>
__device__ __forceinline__ uint32_t scaled_pair_of(uint32_t word) {  // F16 and BF16
    if constexpr (std::is_same_v<T, F16>) return halves_word(__hmul2(word_halves(word), __float2half2_rn(kHalfFactor)));
    return scaled_pair(word << 16, word & 0xffff0000);
}

template <class T>
__device__ __forceinline__ HalfBlock halves_of_floats(const uint8_t* values) {
    const auto* from = reinterpret_cast<const uint4*>(values);
    HalfBlock out;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (std::is_same_v<T, F32>) {
            const uint4 a = from[2 * i], b = from[2 * i + 1];
            out.chunk[i] = {scaled_pair(a.x, a.y), scaled_pair(a.z, a.w), scaled_pair(b.x, b.y), scaled_pair(b.z, b.w)};
        } else {
            const uint4 a = from[i];
            out.chunk[i] = {scaled_pair_of<T>(a.x), scaled_pair_of<T>(a.y), scaled_pair_of<T>(a.z), scaled_pair_of<T>(a.w)};
        }
    }
    return out;
}

}  // namespace detail

// The 32 weights from `column` (a multiple of 32) on of a row that begins with a block at `row`, in shared memory; see packed.cuh
// for `table`. Up to 3 bytes on both sides of the row are read and not used.
__device__ __forceinline__ HalfBlock half_weights(Type type, const uint8_t* row, uint32_t column, const uint8_t* table) {
    switch (type) {
#define TANDEM_CASE(name, number) \
    case Type::name:              \
        return detail::halves_of_floats<name>(row + column * sizeof(name::Block));
        TANDEM_FLOAT_TYPES(TANDEM_CASE)
#undef TANDEM_CASE
#define TANDEM_CASE(name, number)                                                                     \
    case Type::name:                                                                                  \
        return detail::halves_of_block<name>(row + column / name::block_values * sizeof(name::Block), \
                                             column % name::block_values / kBlock, table);
        TANDEM_BLOCK_TYPES(TANDEM_CASE)
#undef TANDEM_CASE
    }
    return {};
}

}  // namespace tandem::quant
