// Emulation of device/copy_async.cuh: the bytes come when they are waited for, and not before.
#pragma once
#include <cuda_runtime.h>

namespace tandem::device {

constexpr size_t kAsyncCopyBytes = 16;

inline void copy_async16(void* shared, const void* global) {
    if (reinterpret_cast<uintptr_t>(shared) % kAsyncCopyBytes != 0 || reinterpret_cast<uintptr_t>(global) % kAsyncCopyBytes != 0)
        emulation::current->block->fail("calls copy_async16 with an address that is not a multiple of 16");
    emulation::current->copies.push_back({shared, global, emulation::current->group});
}

inline void copy_async_commit() {
    emulation::current->group++;
}

template <int num_open>
inline void copy_async_wait() {
    emulation::Thread& self = *emulation::current;
    auto done = [&self](const emulation::OpenCopy& copy) { return copy.group + num_open < self.group; };
    for (const emulation::OpenCopy& copy : self.copies)
        if (done(copy)) std::memcpy(copy.to, copy.from, kAsyncCopyBytes);
    std::erase_if(self.copies, done);
}

}  // namespace tandem::device
