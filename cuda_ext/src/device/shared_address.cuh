// Shared memory by 32-bit addresses: half the registers of a pointer, and the compiler knows what it loads from.
#pragma once
#include <cstdint>

namespace tandem::device {

__device__ __forceinline__ uint32_t shared_address(const void* shared) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}
__device__ __forceinline__ unsigned char* shared_pointer(uint32_t address) {
    return static_cast<unsigned char*>(__cvta_shared_to_generic(address));
}

}  // namespace tandem::device
