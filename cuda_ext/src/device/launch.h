// How a kernel is started. Host code; the kernel's arguments are converted to its parameter types.
#pragma once
#include <cuda_runtime.h>

#include <cstddef>
#include <utility>

#include "device/check.h"

namespace tandem::device {

// `dependent`: programmatic dependent launch. The kernel may start while its predecessor in the stream still runs, and must
// call wait_prerequisites() before it touches what that one writes. `beside`: its blocks should find room on multiprocessors where
// those of dependent launches run; they share one only where both want the same part of its memory to be shared.
struct LaunchShape {
    dim3 grid;
    dim3 block;           // a multiple of 32 threads
    size_t shared_bytes;  // dynamic shared memory
    cudaStream_t stream;
    bool dependent = false;
    bool beside = false;
};

constexpr size_t kSharedWithoutAsking = 48 * 1024;  // a kernel must ask for more

// Throws CudaError where the launch itself is refused.
template <typename... Parameters, typename... Arguments>
void launch(const LaunchShape& shape, void (*kernel)(Parameters...), Arguments&&... arguments) {
    if (shape.shared_bytes > kSharedWithoutAsking)
        CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        static_cast<int>(shape.shared_bytes)));
    if (shape.dependent || shape.beside)
        CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributePreferredSharedMemoryCarveout,
                                        cudaSharedmemCarveoutMaxShared));
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = shape.grid;
    config.blockDim = shape.block;
    config.dynamicSmemBytes = shape.shared_bytes;
    config.stream = shape.stream;
    config.attrs = &attribute;
    config.numAttrs = shape.dependent ? 1 : 0;
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(std::forward<Arguments>(arguments))...));
}

}  // namespace tandem::device
