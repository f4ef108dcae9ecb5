// Emulation of device/dynamic_shared.cuh.
#pragma once
#include <cuda_runtime.h>

namespace tandem::device {

inline unsigned char* dynamic_shared() {
    return emulation::current->block->shared();
}

}  // namespace tandem::device
