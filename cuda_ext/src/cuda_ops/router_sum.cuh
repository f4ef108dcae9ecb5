// Fixed-point sums of a router in device code: ops/router_sum.h.
#pragma once
#include <cuda_runtime.h>

#include "ops/router_sum.h"
#include "quant/arithmetic.h"

namespace tandem::cuda {

// The dot product of a group in units of 1 / kRouterScale.
__device__ __forceinline__ int64_t router_whole(float dot) {
    return __float2ll_rn(quant::mul(fmaxf(fminf(dot, kRouterBound), -kRouterBound), kRouterScale));
}

__device__ __forceinline__ void add_router_sum(int64_t* sum, int64_t value) {
    atomicAdd(reinterpret_cast<unsigned long long*>(sum), static_cast<unsigned long long>(value));
}

}  // namespace tandem::cuda
