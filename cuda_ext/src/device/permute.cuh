// Byte permutation with all that the instruction can do.
#pragma once
#include <cstdint>

namespace tandem::device {

// Byte i of the result is byte (selector >> 4 i) & 7 of b:a; where bit 3 of that nibble is set, it is that byte's highest bit
// repeated. __byte_perm has no such bit and spends an instruction on clearing it.
__device__ __forceinline__ uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
    uint32_t result;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selector));
    return result;
}

}  // namespace tandem::device
