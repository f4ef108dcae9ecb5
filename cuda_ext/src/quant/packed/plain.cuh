// Types with one scale per 32, 64 or 128 weights and evenly spaced levels; ternary TQ1_0 and TQ2_0.
#pragma once
#include "quant/packed/packed.cuh"

namespace tandem::quant {

template <>
struct Packed<Q4_0> : ByPair<Packed<Q4_0>> {
    static constexpr int kFactor = 1, kOffset = 8;
    static constexpr bool kHalves = false;

    __device__ __forceinline__ static void pair(const uint8_t* b, int, int c, const uint8_t*, uint32_t (&w)[2]) {
        const uint32_t x = load_word<2>(b + 2, c);
        w[0] = x & kLowNibbles;
        w[1] = (x >> 4) & kLowNibbles;
    }
    __device__ __forceinline__ static PackedScale scale(const uint8_t* b, int) { return {half_float(load_two_bytes(b))}; }
};

template <>
struct Packed<Q4_1> : ByPair<Packed<Q4_1>> {
    static constexpr int kFactor = 1, kOffset = 0;
    static constexpr bool kHalves = false;

    __device__ __forceinline__ static void pair(const uint8_t* b, int, int c, const uint8_t*, uint32_t (&w)[2]) {
        const uint32_t x = load_word<4>(b + 4, c);
        w[0] = x & kLowNibbles;
        w[1] = (x >> 4) & kLowNibbles;
    }
    __device__ __forceinline__ static PackedScale scale(const uint8_t* b, int) {
        const uint32_t x = load_word<4>(b, 0);
        return {half_float(x), half_float(x >> 16)};
    }
};

template <>
struct Packed<Q5_0> : ByPair<Packed<Q5_0>> {
    static constexpr int kFactor = 1, kOffset = 16;
    static constexpr bool kHalves = false;

    __device__ __forceinline__ static void pair(const uint8_t* b, int, int c, const uint8_t*, uint32_t (&w)[2]) {
        const uint32_t x = load_word<2>(b + 6, c), fifth = load_word<2>(b + 2, 0);
        w[0] = (x & kLowNibbles) | spread_bits<4>(fifth, c);
        w[1] = ((x >> 4) & kLowNibbles) | spread_bits<4>(fifth, c + 4);
    }
    __device__ __forceinline__ static PackedScale scale(const uint8_t* b, int) { return {half_float(load_two_bytes(b))}; }
};

template <>
struct Packed<Q5_1> : ByPair<Packed<Q5_1>> {
    static constexpr int kFactor = 1, kOffset = 0;
    static constexpr bool kHalves = false;

    __device__ __forceinline__ static void pair(const uint8_t* b, int, int c, const uint8_t*, uint32_t (&w)[2]) {
        const uint32_t x = load_word<4>(b + 8, c), fifth = load_word<4>(b + 4, 0);
        w[0] = (x & kLowNibbles) | spread_bits<4>(fifth, c);
        w[1] = ((x >> 4) & kLowNibbles) | spread_bits<4>(fifth, c + 4);
    }
    __device__ __forceinline__ static PackedScale scale(const uint8_t* b, int) {
        const uint32_t x = load_word<4>(b, 0);
        return {half_float(x), half_float(x >> 16)};
    }
};

template <>
struct Packed<Q8_0> : ByWord<Packed<Q8_0>> {
    static constexpr int kFactor = 1, kOffset = 0;
    static constexpr bool kHalves = false;

    __device__ __forceinline__ static uint32_t word(const uint8_t* b, int, int k, const uint8_t*) { return load_word<2>(b + 2, k); }
    __device__ __forceinline__ static PackedScale scale(const uint8_t* b, int) { return {half_float(load_two_bytes(b))}; }
};

template <>
struct Packed<Q1_0> : ByWord<Packed<Q1_0>> {
    static constexpr int kFactor = 2, kOffset = 1;
    static constexpr bool kHalves = false;

    __device__ __forceinline__ static uint32_t word(const uint8_t* b, int j, int k, const uint8_t*) {
        return spread_bits<0>(load_word<2>(b + 2 + 4 * j, 0), k);
    }
    __device__ __forceinline__ static PackedScale scale(const uint8_t* b, int) { return {half_float(load_two_bytes(b))}; }
};

template <>
struct Packed<Q2_0> : ByWord<Packed<Q2_0>> {
    static constexpr int kFactor = 1, kOffset = 1;
    static constexpr bool kHalves = false;

    __device__ __forceinline__ static uint32_t word(const uint8_t* b, int j, int k, const uint8_t*) {
        return spread_pairs(byte_of(load_word<2>(b + 2 + 8 * j, k / 4), k % 4));
    }
    __device__ __forceinline__ static PackedScale scale(const uint8_t* b, int) { return {half_float(load_two_bytes(b))}; }
};

template <>
struct Packed<TQ2_0> : ByWord<Packed<TQ2_0>> {
    static constexpr int kFactor = 1, kOffset = 1;
    static constexpr bool kHalves = false;

    __device__ __forceinline__ static uint32_t word(const uint8_t* b, int j, int k, const uint8_t*) {
        return (load_word<2>(b + 32 * (j / 4), k) >> 2 * (j % 4)) & kLowPairs;
    }
    __device__ __forceinline__ static PackedScale scale(const uint8_t* b, int) { return {half_float(load_two_bytes(b + 64))}; }
};

// Digit p of four bytes at once: the lower eight bits of byte * 3^p, times 3, is a digit and eight bits of rest.
template <>
struct Packed<TQ1_0> : ByWord<Packed<TQ1_0>> {
    static constexpr int kFactor = 1, kOffset = 1;
    static constexpr bool kHalves = false;

    __device__ __forceinline__ static uint32_t word(const uint8_t* b, int j, int k, const uint8_t*) {
        const int offset = j < 5 ? 4 * k : j < 7 || k < 4 ? 32 + 4 * (k % 4) : 48;
        const int digit = j < 5 ? j : j < 7 ? 2 * (j - 5) + k / 4 : k < 4 ? 4 : k - 4;
        const uint32_t power = digit < 4 ? 0x1b090301u >> 8 * digit & 255 : 81;
        const uint32_t x = load_word<2>(b + offset, 0);
        return digits(x, power) | digits(x >> 8, power) << 8;
    }
    __device__ __forceinline__ static PackedScale scale(const uint8_t* b, int) { return {half_float(load_two_bytes(b + 52))}; }

  private:
    __device__ __forceinline__ static uint32_t digits(uint32_t x, uint32_t power) {  // of bytes 0 and 2
        return ((((x & 0x00ff00ff) * power) & 0x00ff00ff) * 3 >> 8) & 0x00030003;
    }
};

}  // namespace tandem::quant
