// Emulation of device/permute.cuh.
#pragma once
#include <cuda_runtime.h>

namespace tandem::device {

inline uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
    uint32_t result = __byte_perm(a, b, selector);
    for (int i = 0; i < 4; i++)
        if (selector >> (4 * i + 3) & 1) {
            const uint32_t byte = result >> 8 * i & 128 ? 255 : 0;
            result = (result & ~(255u << 8 * i)) | byte << 8 * i;
        }
    return result;
}

}  // namespace tandem::device
