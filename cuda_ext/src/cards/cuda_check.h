// Every call of the CUDA runtime and driver goes through one of these.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include <new>
#include <stdexcept>
#include <string>

namespace tandem {

// The card failed; this process can do nothing more with it. A fresh process is the recovery.
struct CudaError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Throws std::bad_alloc when memory is short, else CudaError that names the call.
inline void check_cuda(cudaError_t status, const char* call) {
    if (status == cudaSuccess) return;
    if (status == cudaErrorMemoryAllocation) {
        cudaGetLastError();  // not sticky: forget it
        throw std::bad_alloc();
    }
    throw CudaError(std::string(call) + ": " + cudaGetErrorString(status));
}

inline void check_driver(CUresult status, const char* call) {
    if (status == CUDA_SUCCESS) return;
    if (status == CUDA_ERROR_OUT_OF_MEMORY) throw std::bad_alloc();
    throw CudaError(std::string(call) + ": driver error " + std::to_string(static_cast<int>(status)));
}

}  // namespace tandem

#define CUDA_CHECK(call) ::tandem::check_cuda((call), #call)
#define CUDA_DRIVER_CHECK(call) ::tandem::check_driver((call), #call)
