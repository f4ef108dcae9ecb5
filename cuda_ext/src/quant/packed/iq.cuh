// The types with code books. The book lies in shared memory: eight bytes an entry for IQ2, four for IQ3, the packed two for IQ1.
#pragma once
#include "quant/packed/packed.cuh"

namespace tandem::quant {

// Word k % 2 of entry `index` of eight bytes.
__device__ __forceinline__ uint32_t half_entry(const uint8_t* table, uint32_t index, int k) {
    return *reinterpret_cast<const uint32_t*>(table + 8 * index + 4 * (k % 2));
}
__device__ __forceinline__ uint32_t entry(const uint8_t* table, uint32_t index) {
    return *reinterpret_cast<const uint32_t*>(table + 4 * index);
}
__device__ __forceinline__ int odd_scale(uint32_t nibble) {
    return static_cast<int>(2 * (nibble & 15) + 1);
}
// Eight signs of seven bits, as signs_of_seven.
__device__ __forceinline__ uint32_t eight_signs(uint32_t seven) {
    return seven | (__popc(seven) & 1) << 7;
}

template <>
struct Packed<IQ2_XXS> : ByWord<Packed<IQ2_XXS>> {
    static constexpr int kFactor = 1, kOffset = 0;
    static constexpr bool kHalves = false;

    __device__ __forceinline__ static uint32_t word(const uint8_t* b, int j, int k, const uint8_t* table) {
        const uint32_t patterns = load_word<2>(b + 2 + 8 * j, 0), signs = load_word<2>(b + 2 + 8 * j, 1);
        const uint32_t eight = eight_signs(signs >> 7 * (k / 2) & 127);
        return negate_bytes(half_entry(table, byte_of(patterns, k / 2), k), sign_mask(eight, k % 2));
    }
    __device__ __forceinline__ static PackedScale scale(const uint8_t* b, int j) {
        const int scale = odd_scale(load_word<2>(b + 2 + 8 * j, 1) >> 28);
        return {half_float(load_two_bytes(b)) * 0.125f, 0, {scale, scale}};
    }
};

template <>
struct Packed<IQ2_XS> : ByWord<Packed<IQ2_XS>> {
    static constexpr int kFactor = 1, kOffset = 0;
    static constexpr bool kHalves = true;

    __device__ __forceinline__ static uint32_t word(const uint8_t* b, int j, int k, const uint8_t* table) {
        const uint32_t q = load_two_bytes(b + 2 + 8 * j + 2 * (k / 2));
        return negate_bytes(half_entry(table, q & 511, k), sign_mask(eight_signs(q >> 9), k % 2));
    }
    __device__ __forceinline__ static PackedScale scale(const uint8_t* b, int j) {
        const uint32_t s = b[66 + j];
        return {half_float(load_two_bytes(b)) * 0.125f, 0, {odd_scale(s), odd_scale(s >> 4)}};
    }
};

template <>
struct Packed<IQ2_S> : ByWord<Packed<IQ2_S>> {
    static constexpr int kFactor = 1, kOffset = 0;
    static constexpr bool kHalves = true;

    __device__ __forceinline__ static uint32_t word(const uint8_t* b, int j, int k, const uint8_t* table) {
        const uint32_t lower = load_word<2>(b + 2 + 4 * j, 0), signs = load_word<2>(b + 34 + 4 * j, 0), upper = b[66 + j];
        const uint32_t index = join_bytes(lower, spread_pairs(upper), k / 2);
        return negate_bytes(half_entry(table, index, k), sign_mask(signs, k));
    }
    __device__ __forceinline__ static PackedScale scale(const uint8_t* b, int j) {
        const uint32_t s = b[74 + j];
        return {half_float(load_two_bytes(b)) * 0.125f, 0, {odd_scale(s), odd_scale(s >> 4)}};
    }
};

template <>
struct Packed<IQ3_XXS> : ByWord<Packed<IQ3_XXS>> {
    static constexpr int kFactor = 1, kOffset = 0;
    static constexpr bool kHalves = false;

    __device__ __forceinline__ static uint32_t word(const uint8_t* b, int j, int k, const uint8_t* table) {
        const uint32_t patterns = load_word<2>(b + 2 + 8 * j, k / 4), signs = load_word<2>(b + 66 + 4 * j, 0);
        const uint32_t eight = eight_signs(signs >> 7 * (k / 2) & 127);
        return negate_bytes(entry(table, byte_of(patterns, k % 4)), sign_mask(eight, k % 2));
    }
    __device__ __forceinline__ static PackedScale scale(const uint8_t* b, int j) {
        const int scale = odd_scale(load_word<2>(b + 66 + 4 * j, 0) >> 28);
        return {half_float(load_two_bytes(b)) * 0.25f, 0, {scale, scale}};
    }
};

// The weights are odd, 2 n + 1 with n of 0..7; inverting n's bits negates the weight.
template <>
struct Packed<IQ3_S> : ByWord<Packed<IQ3_S>> {
    static constexpr int kFactor = 2, kOffset = -1;
    static constexpr bool kHalves = false;

    __device__ __forceinline__ static uint32_t word(const uint8_t* b, int j, int k, const uint8_t* table) {
        const uint32_t lower = load_word<2>(b + 2 + 8 * j, k / 4), ninth = b[66 + j], signs = load_word<2>(b + 74 + 4 * j, 0);
        const uint32_t index = join_bytes(lower, spread_bits<0>(ninth, k / 4), k % 4);
        return entry(table, index) ^ sign_mask(signs, k);
    }
    __device__ __forceinline__ static PackedScale scale(const uint8_t* b, int j) {
        const int scale = odd_scale(static_cast<uint32_t>(b[106 + j / 2]) >> 4 * (j % 2));
        return {half_float(load_two_bytes(b)), 0, {scale, scale}};
    }
};

// A weight is 8 * level +- 1 with levels -1, 0, 1: nine less than the bytes here.
__device__ __forceinline__ uint32_t iq1_word(const uint8_t* table, uint32_t pattern, bool lowered, int k) {
    const uint32_t levels = load_two_bytes(table + 2 * pattern);
    return 8 * spread_pairs(byte_of(levels, k % 2)) + (lowered ? 0 : 2 * kLowBits);
}

template <>
struct Packed<IQ1_S> : ByWord<Packed<IQ1_S>> {
    static constexpr int kFactor = 1, kOffset = 9;
    static constexpr bool kHalves = false;

    __device__ __forceinline__ static uint32_t word(const uint8_t* b, int j, int k, const uint8_t* table) {
        const uint32_t lower = load_word<2>(b + 2 + 4 * j, 0), upper = load_two_bytes(b + 34 + 2 * j);
        return iq1_word(table, byte_of(lower, k / 2) | (upper >> 3 * (k / 2) & 7) << 8, upper & 0x8000, k);
    }
    __device__ __forceinline__ static PackedScale scale(const uint8_t* b, int j) {
        const int scale = odd_scale(load_two_bytes(b + 34 + 2 * j) >> 12 & 7);
        return {half_float(load_two_bytes(b)) * 0.125f, 0, {scale, scale}};
    }
};

template <>
struct Packed<IQ1_M> : ByWord<Packed<IQ1_M>> {
    static constexpr int kFactor = 1, kOffset = 9;
    static constexpr bool kHalves = true;

    __device__ __forceinline__ static uint32_t word(const uint8_t* b, int j, int k, const uint8_t* table) {
        const uint32_t lower = load_word<4>(b + 4 * j, 0), upper = load_two_bytes(b + 32 + 2 * j) >> 4 * (k / 2);
        return iq1_word(table, byte_of(lower, k / 2) | (upper & 7) << 8, upper & 8, k);
    }
    // Each of four u16 has a quarter of the f16 scale in its highest nibble.
    __device__ __forceinline__ static PackedScale scale(const uint8_t* b, int j) {
        const uint32_t first = load_word<4>(b + 48, 0), last = load_word<4>(b + 52, 0);
        const uint32_t bits = (first >> 12 & 0x000f) | (first >> 24 & 0x00f0) | (last >> 4 & 0x0f00) | (last >> 16 & 0xf000);
        const uint32_t scales = (j < 4 ? first : last) >> (16 * (j / 2 % 2) + 6 * (j % 2));
        return {half_float(bits) * 0.125f, 0, {odd_scale(scales & 7), odd_scale(scales >> 3 & 7)}};
    }
};

}  // namespace tandem::quant
