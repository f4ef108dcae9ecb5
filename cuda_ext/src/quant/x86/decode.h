// A super-block of 256 weights in registers, and how each type gets there.
#pragma once
#include "quant/types.h"
#include "quant/x86/vectors.h"

namespace tandem::quant {
namespace {

// Lane j of the float vectors belongs to block j. A decoder fills what its `weights` say.
struct alignas(64) Super {
    __m256i w[kBlocks];  // 32 weights each: signed, or unsigned and larger by `offset`
    __m256 d;            // scale; without `halves` the integer scale is in it
    __m256 m;            // signed minimum; without `halves` the integer minimum is in it
    __m256 scale[2];     // halves: integer scales of the first and the last sixteen weights
    __m256i minima;      // halves: int16 pairs, integer minima likewise
};

struct Weights {
    bool is_signed = false;
    int offset = 0;         // what w is larger by
    int largest;            // magnitude in w; up to 32, sums of eight products fit int16
    bool halves = false;    // integer scales and minima belong to sixteen weights
    bool in_pairs = false;  // w was written in pieces of 512 bits, so read it so
};

// One for each block type: `weights`, and decode(bytes of eight blocks of 32, out).
template <class T>
struct Decoder;

}  // namespace
}  // namespace tandem::quant
