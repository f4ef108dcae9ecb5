// Checks of calls that take memory, and of the driver's.
#pragma once
#include <cuda.h>

#include <new>

#include "device/check.h"

namespace tandem {

// The card failed; this process can do nothing more with it. A fresh process is the recovery.
using device::CudaError;

// Throws std::bad_alloc when memory is short.
inline void check_allocation(cudaError_t status, const char* call) {
    if (status == cudaErrorMemoryAllocation) {
        cudaGetLastError();  // not sticky: forget it
        throw std::bad_alloc();
    }
    device::check(status, call, __FILE__, __LINE__);
}

// The same for the driver.
inline void check_driver(CUresult status, const char* call) {
    if (status == CUDA_SUCCESS) return;
    if (status == CUDA_ERROR_OUT_OF_MEMORY) throw std::bad_alloc();
    throw CudaError(cudaErrorUnknown, std::string(call) + " failed: driver error " + std::to_string(static_cast<int>(status)));
}

}  // namespace tandem

#define CUDA_DRIVER_CHECK(call) ::tandem::check_driver((call), #call)
