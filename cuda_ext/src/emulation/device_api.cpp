// The runtime's calls for devices, errors and launches.
#include <cuda.h>
#include <cxxabi.h>
#include <dlfcn.h>

#include <cstdio>
#include <map>
#include <mutex>

#include "emulation/block.h"
#include "emulation/memory.h"
#include "emulation/stream.h"

using namespace tandem::emulation;

namespace {

constexpr size_t kSharedBytes = 48 * 1024;
constexpr size_t kSharedBytesOptin = 227 * 1024;
constexpr size_t kSharedBytesAll = 228 * 1024;
constexpr int kNumMultiprocessors = 5;  // few sizes are multiples of it, so that last blocks have less to do
constexpr int kMaxThreads = 1024;
constexpr int kVersion = 13000;

thread_local cudaError_t last_error = cudaSuccess;

cudaError_t status() {
    return health().failed() ? cudaErrorLaunchFailure : cudaSuccess;
}

cudaError_t remember(cudaError_t error) {
    if (error != cudaSuccess) last_error = error;
    return error;
}

// Dynamic shared memory that each kernel may have.
class SharedLimits {
  public:
    void set(const void* kernel, size_t nbytes) {
        std::lock_guard lock(mutex_);
        limits_[kernel] = nbytes;
    }
    size_t limit(const void* kernel) {
        std::lock_guard lock(mutex_);
        const auto found = limits_.find(kernel);
        return found == limits_.end() ? kSharedBytes : std::max(kSharedBytes, found->second);
    }

  private:
    std::mutex mutex_;
    std::map<const void*, size_t> limits_;
};

SharedLimits& shared_limits() {
    static SharedLimits limits;
    return limits;
}

std::string kernel_name(const void* kernel) {
    Dl_info info;
    if (dladdr(kernel, &info) == 0 || info.dli_sname == nullptr || info.dli_saddr != kernel) return "a kernel";
    int result = 0;
    char* plain = abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &result);
    const std::string name = result == 0 ? plain : info.dli_sname;
    std::free(plain);
    return name;
}

bool dependent(const cudaLaunchConfig_t& config) {
    for (unsigned i = 0; i < config.numAttrs; i++)
        if (config.attrs[i].id == cudaLaunchAttributeProgrammaticStreamSerialization)
            return config.attrs[i].val.programmaticStreamSerializationAllowed != 0;
    return false;
}

cudaError_t check(const cudaLaunchConfig_t& config, const void* kernel) {
    const dim3 &grid = config.gridDim, &block = config.blockDim;
    const size_t num_threads = size_t{block.x} * block.y * block.z;
    if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.y > 65535 || grid.z > 65535) return cudaErrorInvalidConfiguration;
    if (num_threads == 0 || num_threads > kMaxThreads || num_threads % kLanes != 0) return cudaErrorInvalidConfiguration;
    return config.dynamicSmemBytes > shared_limits().limit(kernel) ? cudaErrorInvalidValue : cudaSuccess;
}

}  // namespace

const char* cudaGetErrorName(cudaError_t error) {
    switch (error) {
        case cudaSuccess:
            return "cudaSuccess";
        case cudaErrorInvalidValue:
            return "cudaErrorInvalidValue";
        case cudaErrorMemoryAllocation:
            return "cudaErrorMemoryAllocation";
        case cudaErrorInvalidConfiguration:
            return "cudaErrorInvalidConfiguration";
        case cudaErrorInvalidPitchValue:
            return "cudaErrorInvalidPitchValue";
        case cudaErrorNotReady:
            return "cudaErrorNotReady";
        case cudaErrorLaunchFailure:
            return "cudaErrorLaunchFailure";
        case cudaErrorStreamCaptureUnsupported:
            return "cudaErrorStreamCaptureUnsupported";
        case cudaErrorStreamCaptureUnjoined:
            return "cudaErrorStreamCaptureUnjoined";
        default:
            return "cudaError";
    }
}

const char* cudaGetErrorString(cudaError_t error) {
    static thread_local std::string text;
    text = error == cudaErrorLaunchFailure && health().failed()
               ? health().message()
               : std::string("an emulated card answers ") + cudaGetErrorName(error);
    return text.c_str();
}

cudaError_t cudaPeekAtLastError() {
    return health().failed() ? cudaErrorLaunchFailure : last_error;
}

cudaError_t cudaGetLastError() {
    const cudaError_t error = cudaPeekAtLastError();
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaGetDeviceCount(int* count) {
    *count = kNumCards;
    return status();
}

cudaError_t cudaSetDevice(int number) {
    if (number < 0 || number >= kNumCards) return remember(cudaErrorInvalidDevice);
    set_device(number);
    return status();
}

cudaError_t cudaGetDevice(int* number) {
    *number = device();
    return status();
}

// The memory stays; the error goes.
cudaError_t cudaDeviceReset() {
    cudaDeviceSynchronize();
    health().reset();
    last_error = cudaSuccess;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int number) {
    if (number < 0 || number >= kNumCards) return remember(cudaErrorInvalidDevice);
    *properties = {};
    std::snprintf(properties->name, sizeof properties->name, "Emulated card");
    properties->totalGlobalMem = kCardBytes;
    properties->sharedMemPerBlock = kSharedBytes;
    properties->sharedMemPerBlockOptin = kSharedBytesOptin;
    properties->sharedMemPerMultiprocessor = kSharedBytesAll;
    properties->major = 9;
    properties->multiProcessorCount = kNumMultiprocessors;
    properties->maxThreadsPerBlock = kMaxThreads;
    properties->maxThreadsPerMultiProcessor = 2 * kMaxThreads;
    properties->warpSize = kLanes;
    properties->l2CacheSize = 50 << 20;
    properties->canMapHostMemory = 1;
    properties->pciBusID = number + 1;
    return status();
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int number) {
    if (number < 0 || number >= kNumCards) return remember(cudaErrorInvalidDevice);
    switch (attribute) {
        case cudaDevAttrMultiProcessorCount:
            *value = kNumMultiprocessors;
            return status();
        case cudaDevAttrComputeCapabilityMajor:
            *value = 9;
            return status();
        case cudaDevAttrComputeCapabilityMinor:
            *value = 0;
            return status();
        case cudaDevAttrMaxSharedMemoryPerBlockOptin:
            *value = kSharedBytesOptin;
            return status();
    }
    return remember(cudaErrorInvalidValue);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) {
    *lowest = 0;
    *highest = -5;
    return status();
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int number, int peer) {
    *can = number != peer;
    return status();
}

cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) {
    return status();
}

cudaError_t cudaDriverGetVersion(int* version) {
    *version = kVersion;
    return status();
}

cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = kVersion;
    return status();
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return status();
    if (value < 0 || static_cast<size_t>(value) > kSharedBytesOptin) return remember(cudaErrorInvalidValue);
    shared_limits().set(kernel, static_cast<size_t>(value));
    return status();
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* num_blocks, const void*, int block_size, size_t shared_bytes) {
    const int by_threads = 2 * kMaxThreads / block_size;
    *num_blocks = std::min(by_threads, static_cast<int>(kSharedBytesAll / (shared_bytes + 1024)));
    return status();
}

cudaError_t tandem::emulation::launch(const cudaLaunchConfig_t& config, const void* kernel, std::function<void()> body) {
    if (health().failed()) return cudaErrorLaunchFailure;
    const auto stream = CUstream_st::of(config.stream);
    if (!stream) return remember(cudaErrorInvalidResourceHandle);
    if (const cudaError_t error = check(config, kernel); error != cudaSuccess) return remember(error);
    GridShape shape{config.gridDim, config.blockDim, config.dynamicSmemBytes, dependent(config), kernel_name(kernel)};
    stream->enqueue([shape = std::move(shape), body = std::move(body)] {
        if (health().failed()) return;
        try {
            run_grid(shape, body);
        } catch (const LaunchFailure& failure) {
            health().fail(failure.what());
        }
    });
    return cudaSuccess;
}
