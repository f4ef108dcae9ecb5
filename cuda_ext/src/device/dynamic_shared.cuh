// The dynamic shared memory of a block.
#pragma once

namespace tandem::device {

// 128-byte aligned; as many bytes as the launch asked for. Its content is undefined when a block starts.
__device__ __forceinline__ unsigned char* dynamic_shared() {
    extern __shared__ __align__(128) unsigned char tandem_dynamic_shared[];
    return tandem_dynamic_shared;
}

}  // namespace tandem::device
