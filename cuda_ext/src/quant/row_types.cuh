// What defines the functions of row_device.cuh for a type.
#pragma once
#include "quant/row_device.cuh"

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
