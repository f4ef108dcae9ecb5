// Bytes at any address as a copy of whole 16-byte units sees them.
#pragma once
#include <cstddef>
#include <cstdint>

namespace tandem::device {

constexpr uint32_t kCopyUnit = 16;

// The wanted bytes start `offset` behind `start`. Memory of weights has at least 16 readable bytes on both sides.
struct AlignedSpan {
    const void* start;  // a multiple of `unit`
    uint32_t offset;    // below `unit`
    uint32_t nbytes;    // a multiple of `unit`
};

// `unit`: a power of two, kCopyUnit or more.
__host__ __device__ __forceinline__ AlignedSpan aligned_span(const void* p, size_t nbytes, uint32_t unit = kCopyUnit) {
    const auto offset = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(p)) & (unit - 1);
    const auto rounded = (offset + static_cast<uint32_t>(nbytes) + unit - 1) & ~(unit - 1);
    return {static_cast<const uint8_t*>(p) - offset, offset, rounded};
}

}  // namespace tandem::device
