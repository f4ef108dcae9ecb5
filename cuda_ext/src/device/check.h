// CUDA_CHECK: an error of the CUDA runtime becomes an exception that names the call.
#pragma once
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace tandem::device {

// A CUDA call failed. Most such errors are sticky: the process must end.
class CudaError : public std::runtime_error {
  public:
    CudaError(cudaError_t code, const std::string& message) : std::runtime_error(message), code(code) {}
    const cudaError_t code;
};

inline void check(cudaError_t code, const char* call, const char* file, int line) {
    if (code == cudaSuccess) return;
    throw CudaError(code, std::string(call) + " failed: " + cudaGetErrorString(code) + " (" + cudaGetErrorName(code) + ", " + file +
                              ":" + std::to_string(line) + ")");
}

}  // namespace tandem::device

#define CUDA_CHECK(call) ::tandem::device::check((call), #call, __FILE__, __LINE__)
