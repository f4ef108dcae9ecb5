// Emulation of device/order.cuh.
#pragma once
#include <cuda_runtime.h>

namespace tandem::device {

inline void wait_prerequisites() {
    emulation::current->waited = true;
    emulation::current->block->waited = true;
}

inline void launch_dependents() {
    if (!emulation::current->waited) emulation::current->block->fail("calls launch_dependents() before wait_prerequisites()");
}

inline void spin_pause(Place place = Place::current()) {
    emulation::current->block->spin(place);
}

inline uint64_t load_word_device(const uint64_t* word) {
    return __atomic_load_n(word, __ATOMIC_RELAXED);
}
inline void store_word_device(uint64_t* word, uint64_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELAXED);
}

inline uint32_t load_acquire_device(const uint32_t* flag) {
    return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
}
inline uint32_t load_acquire_system(const uint32_t* flag) {
    return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
}
inline void store_release_device(uint32_t* flag, uint32_t value) {
    __atomic_store_n(flag, value, __ATOMIC_RELEASE);
}
inline void store_release_system(uint32_t* flag, uint32_t value) {
    __atomic_store_n(flag, value, __ATOMIC_RELEASE);
}

}  // namespace tandem::device
