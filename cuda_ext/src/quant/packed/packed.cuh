// Weights as the card multiplies them: a block of 32 as eight words of four int8 each, unpacked by a few instructions per word.
//
// Packed<T> says for a type T, a block of it and the index j of 32 of its weights:
//     words(b, j, table, w)      w[k]: weights 4k .. 4k + 3, lowest byte first
//     pair(b, j, c, table, w)    only words c and c + 4, c < 4: what a lane of a tensor core's operand wants
//     scale(b, j)                scales and minima as T::decode has them
//     scales(b, pair, out)       those of j = 2 * pair and j = 2 * pair + 1; only types for which this is quicker have it
// where the weight is kFactor * w - kOffset: the dot product with q is then kFactor * (w . q) - kOffset * sum of q.
//     kHalves   whether the scales (or minima) of the first and the last sixteen weights differ
//     kAlign    bytes to which blocks are aligned in a row that begins at a multiple of 16
// `table` is the code book of load_table() in shared memory; null where the type has none.
#pragma once
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "device/permute.cuh"
#include "quant/block32.h"
#include "quant/types.h"

namespace tandem::quant {

struct PackedScale {
    float d;
    float m = 0;            // signed; only read where the type has minima
    int scale[2] = {1, 1};  // of the first and the last sixteen weights; only scale[0] is read without kHalves
    int minimum[2] = {1, 1};
};

template <class T>
struct Packed;

constexpr uint32_t kLowNibbles = 0x0f0f0f0f;
constexpr uint32_t kLowPairs = 0x03030303;
constexpr uint32_t kLowBits = 0x01010101;

// The greatest power of two, up to 16, that divides a block's size.
template <class T>
constexpr int block_align() {
    constexpr int size = static_cast<int>(sizeof(typename T::Block));
    return (size & -size) < 16 ? (size & -size) : 16;
}

// ---- loads ----

// Word `index` of an array that begins at a multiple of `align`. Below 4 it is cut out of two words; neighbouring words of one
// array share their loads.
template <int align>
__device__ __forceinline__ uint32_t load_word(const uint8_t* array, int index) {
    if constexpr (align >= 4) {
        return reinterpret_cast<const uint32_t*>(array)[index];
    } else {
        const auto past = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(array) & 3);
        const auto* words = reinterpret_cast<const uint32_t*>(array - past);
        return __funnelshift_r(words[index], words[index + 1], 8 * past);
    }
}
// Bits `from` .. `from` + 31 of the array from its word `index` on, -8 < from < 8: of what lies outside the word only bits beside a
// field's are right. The words on both sides can be read.
__device__ __forceinline__ uint32_t load_bits(const uint8_t* array, int index, int from) {
    const int shift = 8 * static_cast<int>(reinterpret_cast<uintptr_t>(array) & 3) + from;
    const auto* words = reinterpret_cast<const uint32_t*>(array - (reinterpret_cast<uintptr_t>(array) & 3)) + (shift < 0 ? -1 : 0);
    return __funnelshift_r(words[index], words[index + 1], static_cast<uint32_t>(shift) & 31);
}
__device__ __forceinline__ uint4 load_four_words(const uint8_t* p) {  // at a multiple of 16
    return *reinterpret_cast<const uint4*>(p);
}
__device__ __forceinline__ uint32_t load_two_bytes(const uint8_t* p) {  // at a multiple of 2
    return *reinterpret_cast<const uint16_t*>(p);
}
__device__ __forceinline__ float half_float(uint32_t bits) {  // of the lower sixteen bits
    return f16_float(static_cast<uint16_t>(bits));
}

// ---- bits and fields to bytes ----

// Bits 4k .. 4k + 3 of x, each in the lowest bit of a byte, times 1 << place.
template <int place>
__device__ __forceinline__ uint32_t spread_bits(uint32_t x, int k) {
    return (((x >> 4 * k) & 15) * (0x00204081u << place)) & (kLowBits << place);
}
// Four two-bit fields of a byte to four bytes.
__device__ __forceinline__ uint32_t spread_pairs(uint32_t byte) {
    const uint32_t halves = (byte | byte << 12) & 0x000f000f;
    return (halves | halves << 6) & kLowPairs;
}
// Byte k of `lower` and, above it, byte k of `upper`, whose highest bits are clear.
__device__ __forceinline__ uint32_t join_bytes(uint32_t lower, uint32_t upper, int k) {
    return device::permute(lower, upper, 0xcc40 + 0x11 * static_cast<uint32_t>(k));
}
__device__ __forceinline__ uint32_t byte_of(uint32_t x, int k) {
    return (x >> 8 * k) & 255;
}

// Bytes 0xff where bit 4k + i of `signs` is set, else 0.
__device__ __forceinline__ uint32_t sign_mask(uint32_t signs, int k) {
    return device::permute(((signs >> 4 * k) & 15) * 0x10204080u, 0, 0xba98);  // each byte's highest bit, repeated
}
// Negates the bytes under the mask; none of them is zero, so that nothing carries from one to the next.
__device__ __forceinline__ uint32_t negate_bytes(uint32_t w, uint32_t mask) {
    return (w ^ mask) + (mask & kLowBits);
}

// ---- from one word, or one pair of words, to all eight ----

template <class P>
struct ByWord {
    __device__ __forceinline__ static void words(const uint8_t* b, int j, const uint8_t* table, uint32_t (&w)[8]) {
#pragma unroll
        for (int k = 0; k < 8; k++) w[k] = P::word(b, j, k, table);
    }
    __device__ __forceinline__ static void pair(const uint8_t* b, int j, int c, const uint8_t* table, uint32_t (&w)[2]) {
        w[0] = P::word(b, j, c, table);
        w[1] = P::word(b, j, c + 4, table);
    }
};

template <class P>
struct ByPair {
    __device__ __forceinline__ static void words(const uint8_t* b, int j, const uint8_t* table, uint32_t (&w)[8]) {
#pragma unroll
        for (int c = 0; c < 4; c++) {
            uint32_t two[2];
            P::pair(b, j, c, table, two);
            w[c] = two[0];
            w[c + 4] = two[1];
        }
    }
};

}  // namespace tandem::quant
