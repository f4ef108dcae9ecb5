// Bytes at any address as a copy of whole 16-byte units sees them.
#pragma once
#include <cstddef>
#include <cstdint>

namespace tandem::device {

constexpr uint32_t kCopyUnit = 16;

// The wanted bytes start `offset` behind `start`. Memory of weights has at least 16 readable bytes on both sides.
struct AlignedSpan {
    const void* start;  // 16-byte aligned
    uint32_t offset;    // 0..15
    uint32_t nbytes;    // a multiple of 16
};

__host__ __device__ __forceinline__ AlignedSpan aligned_span(const void* p, size_t nbytes) {
    const auto offset = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(p) % kCopyUnit);
    const auto rounded = static_cast<uint32_t>((offset + nbytes + kCopyUnit - 1) / kCopyUnit * kCopyUnit);
    return {static_cast<const uint8_t*>(p) - offset, offset, rounded};
}

}  // namespace tandem::device
