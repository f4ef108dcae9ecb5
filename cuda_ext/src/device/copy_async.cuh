// Copies by single threads from global to shared memory that go on while the thread does something else.
#pragma once
#include <cstdint>

namespace tandem::device {

// Copies 16 bytes, aligned on both sides. The thread itself sees them after copy_async_wait, others after a barrier on top.
__device__ __forceinline__ void copy_async16(void* shared, const void* global) {
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
}

// Closes the group of this thread's copies since the last call.
__device__ __forceinline__ void copy_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most the newest `num_open` groups of this thread are still under way.
template <int num_open>
__device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(num_open) : "memory");
}

}  // namespace tandem::device
