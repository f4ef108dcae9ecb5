// The K types: super-blocks of 256 weights whose scales are integers under one or two f16.
#pragma once
#include "quant/packed/packed.cuh"

namespace tandem::quant {

template <>
struct Packed<Q2_K> : ByWord<Packed<Q2_K>> {
    static constexpr int kFactor = 1, kOffset = 0;
    static constexpr bool kHalves = true;

    __device__ __forceinline__ static uint32_t word(const uint8_t* b, int j, int k, const uint8_t*) {
        return (load_word<4>(b + 16 + 32 * (j / 4), k) >> 2 * (j % 4)) & kLowPairs;
    }
    __device__ __forceinline__ static PackedScale scale(const uint8_t* b, int j) {
        const uint32_t x = load_word<4>(b + 80, 0), s = load_two_bytes(b + 2 * j);
        return {half_float(x),
                -half_float(x >> 16),
                {static_cast<int>(s & 15), static_cast<int>(s >> 8 & 15)},
                {static_cast<int>(s >> 4 & 15), static_cast<int>(s >> 12)}};
    }
};

template <>
struct Packed<Q3_K> : ByWord<Packed<Q3_K>> {
    static constexpr int kFactor = 1, kOffset = 4;
    static constexpr bool kHalves = true;

    __device__ __forceinline__ static uint32_t word(const uint8_t* b, int j, int k, const uint8_t*) {
        const uint32_t high = load_bits(b, k, j) & kLowBits;
        return (load_bits(b + 32 + 32 * (j / 4), k, 2 * (j % 4)) & kLowPairs) + 4 * high;
    }
    __device__ __forceinline__ static PackedScale scale(const uint8_t* b, int j) {
        const uint32_t low = load_two_bytes(b + 96 + 2 * j % 8) >> 4 * (j / 4) & 0x0f0f;
        const uint32_t both = low | (load_two_bytes(b + 104 + 2 * j % 4) >> 2 * (j / 2) & 0x0303) << 4;
        return {half_float(load_two_bytes(b + 108)), 0, {static_cast<int>(both & 255) - 32, static_cast<int>(both >> 8) - 32}};
    }
};

// Scale and minimum j of the header that Q4_K and Q5_K share: d, m and the twelve bytes of types/k_scale.h.
__device__ __forceinline__ PackedScale k_packed_scale(const uint8_t* b, int j) {
    const uint4 header = load_four_words(b);
    const int byte = 8 * (j % 4);
    const uint32_t scales = header.y >> byte, minima = header.z >> byte, lower = header.w >> byte;
    const uint32_t scale = j < 4 ? scales & 63 : (lower & 15) | (scales >> 2 & 48);
    const uint32_t minimum = j < 4 ? minima & 63 : (lower >> 4 & 15) | (minima >> 2 & 48);
    return {half_float(header.x),
            -half_float(header.x >> 16),
            {static_cast<int>(scale), static_cast<int>(scale)},
            {static_cast<int>(minimum), static_cast<int>(minimum)}};
}

// The same of j = 2 * pair and j = 2 * pair + 1, two bytes at a time.
__device__ __forceinline__ void k_packed_scales(const uint8_t* b, int pair, PackedScale (&out)[2]) {
    const uint4 header = load_four_words(b);
    const int at = 16 * (pair % 2);
    const uint32_t low = header.y >> at, lower = header.w >> at, low_minima = header.z >> at;
    const uint32_t scales = pair < 2 ? low & 0x3f3f : (lower & 0x0f0f) | (low >> 2 & 0x3030);
    const uint32_t minima = pair < 2 ? low_minima & 0x3f3f : (lower >> 4 & 0x0f0f) | (low_minima >> 2 & 0x3030);
    const float d = half_float(header.x), m = -half_float(header.x >> 16);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int scale = static_cast<int>(byte_of(scales, i)), minimum = static_cast<int>(byte_of(minima, i));
        out[i] = {d, m, {scale, scale}, {minimum, minimum}};
    }
}

template <>
struct Packed<Q4_K> {
    static constexpr int kFactor = 1, kOffset = 0;
    static constexpr bool kHalves = false;

    __device__ __forceinline__ static void words(const uint8_t* b, int j, const uint8_t*, uint32_t (&w)[8]) {
        const uint8_t* qs = b + 16 + 32 * (j / 2);
        const uint4 x[2] = {load_four_words(qs), load_four_words(qs + 16)};
        const int high = 4 * (j % 2);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            w[4 * h] = (x[h].x >> high) & kLowNibbles;
            w[4 * h + 1] = (x[h].y >> high) & kLowNibbles;
            w[4 * h + 2] = (x[h].z >> high) & kLowNibbles;
            w[4 * h + 3] = (x[h].w >> high) & kLowNibbles;
        }
    }
    __device__ __forceinline__ static void pair(const uint8_t* b, int j, int c, const uint8_t*, uint32_t (&w)[2]) {
        const uint8_t* qs = b + 16 + 32 * (j / 2) + 4 * c;
        w[0] = (load_word<4>(qs, 0) >> 4 * (j % 2)) & kLowNibbles;
        w[1] = (load_word<4>(qs + 16, 0) >> 4 * (j % 2)) & kLowNibbles;
    }
    __device__ __forceinline__ static PackedScale scale(const uint8_t* b, int j) { return k_packed_scale(b, j); }
    __device__ __forceinline__ static void scales(const uint8_t* b, int pair, PackedScale (&out)[2]) {
        k_packed_scales(b, pair, out);
    }
};

template <>
struct Packed<Q5_K> {
    static constexpr int kFactor = 1, kOffset = 0;
    static constexpr bool kHalves = false;

    __device__ __forceinline__ static void words(const uint8_t* b, int j, const uint8_t*, uint32_t (&w)[8]) {
        const uint8_t *qs = b + 48 + 32 * (j / 2), *qh = b + 16;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const uint4 x = load_four_words(qs + 16 * h), fifth = load_four_words(qh + 16 * h);
            w[4 * h] = join(x.x, fifth.x, j);
            w[4 * h + 1] = join(x.y, fifth.y, j);
            w[4 * h + 2] = join(x.z, fifth.z, j);
            w[4 * h + 3] = join(x.w, fifth.w, j);
        }
    }
    __device__ __forceinline__ static void pair(const uint8_t* b, int j, int c, const uint8_t*, uint32_t (&w)[2]) {
        const uint8_t *qs = b + 48 + 32 * (j / 2) + 4 * c, *qh = b + 16 + 4 * c;
        w[0] = join(load_word<4>(qs, 0), load_word<4>(qh, 0), j);
        w[1] = join(load_word<4>(qs + 16, 0), load_word<4>(qh + 16, 0), j);
    }
    __device__ __forceinline__ static PackedScale scale(const uint8_t* b, int j) { return k_packed_scale(b, j); }
    __device__ __forceinline__ static void scales(const uint8_t* b, int pair, PackedScale (&out)[2]) {
        k_packed_scales(b, pair, out);
    }

  private:
    __device__ __forceinline__ static uint32_t join(uint32_t nibbles, uint32_t fifth, int j) {
        return ((nibbles >> 4 * (j % 2)) & kLowNibbles) + 16 * ((fifth >> j) & kLowBits);
    }
};

template <>
struct Packed<Q6_K> : ByWord<Packed<Q6_K>> {
    static constexpr int kFactor = 1, kOffset = 32;
    static constexpr bool kHalves = true;

    __device__ __forceinline__ static uint32_t word(const uint8_t* b, int j, int k, const uint8_t*) {
        const uint32_t low = load_bits(b + 64 * (j / 4) + 32 * (j % 2), k, 4 * (j % 4 / 2));
        return (low & kLowNibbles) | (load_bits(b + 128 + 32 * (j / 4), k, 2 * (j % 4) - 4) & kLowPairs << 4);
    }
    __device__ __forceinline__ static PackedScale scale(const uint8_t* b, int j) {
        const uint32_t s = load_two_bytes(b + 192 + 2 * j);
        return {half_float(load_two_bytes(b + 208)), 0, {static_cast<int8_t>(s & 255), static_cast<int8_t>(s >> 8)}};
    }
};

}  // namespace tandem::quant
