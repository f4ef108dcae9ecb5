// A value whose uses the compiler does not move above this point.
#pragma once
#include <cstdint>

namespace tandem::device {

__device__ __forceinline__ uint32_t pinned(uint32_t x) {
    asm volatile("" : "+r"(x));
    return x;
}

}  // namespace tandem::device
