// Emulation of device/shared_address.cuh: addresses count from the block's dynamic shared memory.
#pragma once
#include "device/dynamic_shared.cuh"

namespace tandem::device {

inline uint32_t shared_address(const void* shared) {
    return static_cast<uint32_t>(static_cast<const unsigned char*>(shared) - dynamic_shared());
}
inline unsigned char* shared_pointer(uint32_t address) {
    return dynamic_shared() + static_cast<int32_t>(address);
}

}  // namespace tandem::device
