// One function per weight type and number of inputs, each compiled once (quant/rows_*.cu).
#pragma once
#include "quant/row_frame.cuh"

namespace tandem::quant {

// By one input row, and by 2 to 8.
template <class T>
__device__ void dot_one(SharedDots p);
template <class T>
__device__ void dot_several(SharedDots p);

}  // namespace tandem::quant

// The two functions of a type, in exactly one file.
#define TANDEM_DOT_BLOCKS(name)                                                     \
    template <>                                                                     \
    __device__ void tandem::quant::dot_one<tandem::quant::name>(SharedDots p) {     \
        dot_blocks<name, 4, 1>(p);                                                  \
    }                                                                               \
    template <>                                                                     \
    __device__ void tandem::quant::dot_several<tandem::quant::name>(SharedDots p) { \
        dot_blocks<name, 2, kMaxInputs>(p);                                         \
    }
#define TANDEM_DOT_FLOATS(name)                                                     \
    template <>                                                                     \
    __device__ void tandem::quant::dot_one<tandem::quant::name>(SharedDots p) {     \
        dot_floats<name, 4, 1>(p);                                                  \
    }                                                                               \
    template <>                                                                     \
    __device__ void tandem::quant::dot_several<tandem::quant::name>(SharedDots p) { \
        dot_floats<name, 2, kMaxInputs>(p);                                         \
    }
