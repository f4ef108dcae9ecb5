// A warp's copies of weights into shared memory, started early and waited for late.
//
// From compute capability 9.0 on the bulk copy engine moves the bytes and an mbarrier counts them; before that every lane
// copies 16-byte units, and wait() waits for all stages of the warp.
#pragma once
#include <cstdint>

#include "device/aligned_span.cuh"
#include "device/copy_async.cuh"

namespace tandem::device {

// One per warp and stage, in shared memory. A round: any number of start(), then one wait(). All lanes of the warp call every
// method but init(), which one thread calls; a barrier of the warp must stand between init() and the first start().
//
// The destination may be started again only after every lane has read it (a __syncwarp() stands between). Where it was
// written by ordinary stores, the writing lanes call fence_stores() before that __syncwarp().
class alignas(16) StagedCopy {
  public:
    __device__ __forceinline__ void init() {
#if __CUDA_ARCH__ >= 900
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n\tfence.mbarrier_init.release.cluster;" ::"r"(address()) : "memory");
#endif
    }

    // `shared` and `global` are 16-byte aligned, nbytes a multiple of 16 (see aligned_span); the bytes are read once, so they
    // are the first to leave the L2 cache.
    __device__ __forceinline__ void start(void* shared, const void* global, uint32_t nbytes, int lane) {
#if __CUDA_ARCH__ >= 900
        if (lane != 0) return;
        const auto destination = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
        uint64_t policy;
        asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
        asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(nbytes) : "memory");
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
                destination),
            "l"(global), "r"(nbytes), "r"(address()), "l"(policy)
            : "memory");
#else
        for (uint32_t at = lane * kCopyUnit; at < nbytes; at += 32 * kCopyUnit)
            copy_async16(static_cast<uint8_t*>(shared) + at, static_cast<const uint8_t*>(global) + at);
        copy_async_commit();
#endif
    }

    // Returns when the bytes of this round are there, for every lane. `parity`: of the round's number, the first is 0.
    __device__ __forceinline__ void wait(int lane, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
        if (lane == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address()) : "memory");
        while (!round_done(parity)) {
        }
        __syncwarp();
#else
        copy_async_wait<0>();
        __syncwarp();
#endif
    }

  private:
    __device__ __forceinline__ uint32_t address() const { return static_cast<uint32_t>(__cvta_generic_to_shared(&barrier_)); }

    __device__ __forceinline__ bool round_done(uint32_t parity) const {
        uint32_t done = 0;
#if __CUDA_ARCH__ >= 900
        asm volatile("{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}"
                     : "=r"(done)
                     : "r"(address()), "r"(parity)
                     : "memory");
#endif
        return done != 0;
    }

    uint64_t barrier_;
};

// Makes this thread's stores to shared memory come before bulk copies that start later.
__device__ __forceinline__ void fence_stores() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

}  // namespace tandem::device
