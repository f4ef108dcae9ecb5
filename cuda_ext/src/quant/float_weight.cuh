// A weight of the float types on the card.
#pragma once
#include <cuda_runtime.h>

#include "quant/scalar.h"
#include "quant/types.h"

namespace tandem::quant {

__device__ __forceinline__ float float_weight(const F32::Block* w) {
    return *reinterpret_cast<const float*>(w);
}
__device__ __forceinline__ float float_weight(const F16::Block* w) {
    return f16_float(*reinterpret_cast<const uint16_t*>(w));
}
__device__ __forceinline__ float float_weight(const BF16::Block* w) {
    return bits_float(static_cast<uint32_t>(*reinterpret_cast<const uint16_t*>(w)) << 16);
}

}  // namespace tandem::quant
