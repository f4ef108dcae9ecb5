// The runtime's calls for memory and copies.
#include <cstring>
#include <memory>
#include <vector>

#include "emulation/memory.h"
#include "emulation/stream.h"

using namespace tandem::emulation;

namespace {

cudaError_t status() {
    return health().failed() ? cudaErrorLaunchFailure : cudaSuccess;
}

cudaError_t allocate(void** pointer, size_t nbytes, cudaMemoryType type) {
    if (health().failed()) return cudaErrorLaunchFailure;
    *pointer = nbytes == 0 ? nullptr : memory().allocate(nbytes, type, device_in_use());
    return nbytes != 0 && *pointer == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}

bool pageable(const void* pointer) {
    return !memory().find(pointer).has_value();
}

// Copying from pageable memory takes the bytes at once, copying to it waits, as on a card. In a capture neither is possible.
cudaError_t copy(CUstream_st& stream, void* to, const void* from, size_t nbytes, cudaMemcpyKind kind) {
    if (stream.capture || kind == cudaMemcpyDeviceToDevice) {
        stream.enqueue([=] { std::memmove(to, from, nbytes); });
        return status();
    }
    if (kind == cudaMemcpyHostToDevice && pageable(from)) {
        const auto* bytes = static_cast<const uint8_t*>(from);
        stream.enqueue(
            [to, staged = std::vector<uint8_t>(bytes, bytes + nbytes)] { std::memcpy(to, staged.data(), staged.size()); });
        return status();
    }
    stream.enqueue([=] { std::memmove(to, from, nbytes); });
    if (kind == cudaMemcpyDeviceToHost && pageable(to)) stream.wait_idle();
    return status();
}

}  // namespace

cudaError_t cudaMalloc(void** pointer, size_t nbytes) {
    return allocate(pointer, nbytes, cudaMemoryTypeDevice);
}
cudaError_t cudaHostAlloc(void** pointer, size_t nbytes, unsigned) {
    return allocate(pointer, nbytes, cudaMemoryTypeHost);
}

cudaError_t cudaFree(void* pointer) {
    if (pointer == nullptr) return status();
    const cudaError_t waited = cudaDeviceSynchronize();
    if (!memory().free(pointer, cudaMemoryTypeDevice)) return cudaErrorInvalidValue;
    return waited == cudaSuccess ? status() : waited;
}

cudaError_t cudaFreeHost(void* pointer) {
    if (pointer == nullptr) return status();
    return memory().free(pointer, cudaMemoryTypeHost) ? status() : cudaErrorInvalidValue;
}

cudaError_t cudaHostRegister(void* pointer, size_t nbytes, unsigned) {
    if (pointer == nullptr || nbytes == 0) return cudaErrorInvalidValue;
    device_in_use();
    const cudaError_t error = memory().add_registered(pointer, nbytes);
    return error == cudaSuccess ? status() : error;
}

cudaError_t cudaHostUnregister(void* pointer) {
    return memory().remove_registered(pointer) ? status() : cudaErrorHostMemoryNotRegistered;
}

cudaError_t cudaHostGetDevicePointer(void** on_card, void* host, unsigned) {
    const auto region = memory().find(host);
    if (!region || region->type != cudaMemoryTypeHost) return cudaErrorInvalidValue;
    *on_card = host;
    return status();
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
    const auto region = memory().find(pointer);
    auto* address = const_cast<void*>(pointer);
    if (!region)
        *attributes = {cudaMemoryTypeUnregistered, -2, nullptr, address};
    else
        *attributes = {region->type, region->device, address, region->type == cudaMemoryTypeHost ? address : nullptr};
    return status();
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    *free = memory().free_bytes(device_in_use());
    *total = kCardBytes;
    return status();
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t nbytes, cudaMemcpyKind kind, cudaStream_t handle) {
    const auto stream = CUstream_st::of(handle);
    if (!stream) return cudaErrorInvalidResourceHandle;
    return copy(*stream, to, from, nbytes, kind);
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t nbytes, cudaMemcpyKind kind) {
    const cudaError_t error = cudaMemcpyAsync(to, from, nbytes, kind, nullptr);
    return error == cudaSuccess ? cudaStreamSynchronize(nullptr) : error;
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                              cudaMemcpyKind kind, cudaStream_t stream) {
    if (width > to_pitch || width > from_pitch) return cudaErrorInvalidPitchValue;
    for (size_t y = 0; y < height; y++) {
        const cudaError_t error = cudaMemcpyAsync(static_cast<uint8_t*>(to) + y * to_pitch,
                                                  static_cast<const uint8_t*>(from) + y * from_pitch, width, kind, stream);
        if (error != cudaSuccess) return error;
    }
    return status();
}

cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t nbytes, cudaStream_t stream) {
    return cudaMemcpyAsync(to, from, nbytes, cudaMemcpyDeviceToDevice, stream);
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t nbytes, cudaStream_t handle) {
    const auto stream = CUstream_st::of(handle);
    if (!stream) return cudaErrorInvalidResourceHandle;
    stream->enqueue([=] { std::memset(to, value, nbytes); });
    return status();
}

cudaError_t cudaMemset(void* to, int value, size_t nbytes) {
    const cudaError_t error = cudaMemsetAsync(to, value, nbytes, nullptr);
    return error == cudaSuccess ? cudaStreamSynchronize(nullptr) : error;
}
