// Order between kernels, cards and host: dependent launches, flags, spinning.
#pragma once
#include <cstdint>

namespace tandem::device {

// Waits until the kernels before this one have finished and their writes are visible. Does nothing where the launch was not
// dependent, and below compute capability 9.0.
__device__ __forceinline__ void wait_prerequisites() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel of the stream start, once every block has called it or ended. Only after wait_prerequisites(): then
// whatever the kernel before the predecessor wrote is complete when a kernel starts.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// In the body of every loop that waits for memory to change.
__device__ __forceinline__ void spin_pause() {
    __nanosleep(20);
}

// A value and what says that it is there in one word, for other blocks of this card: unlike a flag it waits for no other memory.
__device__ __forceinline__ uint64_t load_word_device(const uint64_t* word) {
    uint64_t value;
    asm volatile("ld.relaxed.gpu.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}
__device__ __forceinline__ void store_word_device(uint64_t* word, uint64_t value) {
    asm volatile("st.relaxed.gpu.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// Flags seen by other blocks of this card (`_device`), or by the host and other cards too (`_system`).
__device__ __forceinline__ uint32_t load_acquire_device(const uint32_t* flag) {
    uint32_t value;
    asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    return value;
}
__device__ __forceinline__ uint32_t load_acquire_system(const uint32_t* flag) {
    uint32_t value;
    asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    return value;
}
__device__ __forceinline__ void store_release_device(uint32_t* flag, uint32_t value) {
    asm volatile("st.release.gpu.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}
__device__ __forceinline__ void store_release_system(uint32_t* flag, uint32_t value) {
    asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

}  // namespace tandem::device
