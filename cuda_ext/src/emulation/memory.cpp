#include "emulation/memory.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "emulation/stream.h"

namespace tandem::emulation {

namespace {

constexpr size_t kGuard = 512;  // and the alignment
constexpr uint8_t kGuardByte = 0xa5;
constexpr uint8_t kUndefined = 0xff;         // NaN as a float
constexpr size_t kFilled = size_t{4} << 20;  // larger memory is left as the system gives it
constexpr size_t kKept = size_t{4} << 20;    // bytes of freed memory

thread_local int current_device = 0;
std::array<std::atomic<bool>, kNumCards> contexts{};

std::string describe(const Region& region) {
    return std::to_string(region.nbytes) + " bytes of " +
           (region.type == cudaMemoryTypeDevice ? "card " + std::to_string(region.device) : std::string("pinned host")) + " memory";
}

void check_guard(const Region& region) {
    if (region.registered) return;
    auto untouched = [](const uint8_t* guard) {
        return std::all_of(guard, guard + kGuard, [](uint8_t b) { return b == kGuardByte; });
    };
    if (!untouched(region.data - kGuard)) health().fail("something wrote before " + describe(region));
    if (!untouched(region.data + region.nbytes)) health().fail("something wrote behind " + describe(region));
}

void check_dead(const Region& region) {
    if (std::all_of(region.data, region.data + region.nbytes, [](uint8_t b) { return b == kUndefined; })) return;
    health().fail("something wrote to " + describe(region) + " after it was freed");
    std::memset(region.data, kUndefined, region.nbytes);  // told once
}

}  // namespace

void* Memory::allocate(size_t nbytes, cudaMemoryType type, int device) {
    std::lock_guard lock(mutex_);
    if (type == cudaMemoryTypeDevice && used_[device] + nbytes > kCardBytes) return nullptr;
    auto* memory = static_cast<uint8_t*>(std::aligned_alloc(kGuard, (nbytes + 3 * kGuard - 1) / kGuard * kGuard));
    if (memory == nullptr) return nullptr;
    const Region region{memory + kGuard, nbytes, type, device, false};
    std::memset(memory, kGuardByte, kGuard);
    if (nbytes <= kFilled) std::memset(region.data, kUndefined, nbytes);
    std::memset(region.data + nbytes, kGuardByte, kGuard);
    regions_[region.data] = region;
    if (type == cudaMemoryTypeDevice) used_[device] += nbytes;
    return region.data;
}

bool Memory::free(void* pointer, cudaMemoryType type) {
    std::lock_guard lock(mutex_);
    const auto found = regions_.find(static_cast<uint8_t*>(pointer));
    if (found == regions_.end() || found->second.type != type || found->second.registered) return false;
    const Region region = found->second;
    check_guard(region);
    if (type == cudaMemoryTypeDevice) used_[region.device] -= region.nbytes;
    regions_.erase(found);
    bury(region);
    return true;
}

void Memory::bury(const Region& region) {
    std::memset(region.data, kUndefined, region.nbytes);
    freed_.push_back(region);
    freed_bytes_ += region.nbytes;
    for (const Region& dead : freed_) check_dead(dead);
    while (freed_bytes_ > kKept) {
        freed_bytes_ -= freed_.front().nbytes;
        std::free(freed_.front().data - kGuard);
        freed_.pop_front();
    }
}

cudaError_t Memory::add_registered(void* pointer, size_t nbytes) {
    std::lock_guard lock(mutex_);
    auto* data = static_cast<uint8_t*>(pointer);
    for (const auto& [start, region] : regions_)
        if (start < data + nbytes && data < start + region.nbytes) return cudaErrorHostMemoryAlreadyRegistered;
    regions_[data] = {data, nbytes, cudaMemoryTypeHost, 0, true};
    return cudaSuccess;
}

bool Memory::remove_registered(void* pointer) {
    std::lock_guard lock(mutex_);
    const auto found = regions_.find(static_cast<uint8_t*>(pointer));
    if (found == regions_.end() || !found->second.registered) return false;
    regions_.erase(found);
    return true;
}

std::optional<Region> Memory::find(const void* pointer) {
    std::lock_guard lock(mutex_);
    const auto* data = static_cast<const uint8_t*>(pointer);
    auto found = regions_.upper_bound(data);
    if (found == regions_.begin()) return std::nullopt;
    const Region& region = std::prev(found)->second;
    if (data >= region.data + region.nbytes) return std::nullopt;
    return region;
}

bool Memory::take(int device, size_t nbytes) {
    std::lock_guard lock(mutex_);
    if (used_[device] + nbytes > kCardBytes) return false;
    used_[device] += nbytes;
    return true;
}

void Memory::give_back(int device, size_t nbytes) {
    std::lock_guard lock(mutex_);
    used_[device] -= nbytes;
}

size_t Memory::free_bytes(int device) {
    std::lock_guard lock(mutex_);
    return kCardBytes - used_[device];
}

Memory& memory() {
    static auto* memory = new Memory;
    return *memory;
}

int device() {
    return current_device;
}

void set_device(int device) {
    current_device = device;
    contexts[device] = true;
}

int device_in_use() {
    contexts[current_device] = true;
    return current_device;
}

bool has_context(int device) {
    return contexts[device];
}

}  // namespace tandem::emulation
