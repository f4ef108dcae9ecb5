// One function per weight type and number of input rows, each compiled once: by one row in quant/one_*.cu, by 2 to 8 in
// quant/several_*.cu.
#pragma once
#include "quant/row_device.cuh"

namespace tandem::quant {

template <class T>
__device__ void dot_one(SharedDots p);
template <class T>
__device__ void dot_several(SharedDots p);

}  // namespace tandem::quant

#define TANDEM_DOT_ONE(name, frame)                                             \
    template <>                                                                 \
    __device__ void tandem::quant::dot_one<tandem::quant::name>(SharedDots p) { \
        frame<name>(p);                                                         \
    }
#define TANDEM_DOT_SEVERAL(name, frame)                                             \
    template <>                                                                     \
    __device__ void tandem::quant::dot_several<tandem::quant::name>(SharedDots p) { \
        frame<name, 2, kMaxInputs>(p);                                              \
    }
