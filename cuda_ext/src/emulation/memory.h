// Memory that the runtime knows: of cards, with guard space around it, and pinned host memory.
#pragma once
#include <cuda_runtime.h>

#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>

namespace tandem::emulation {

constexpr int kNumCards = 2;
constexpr size_t kCardBytes = size_t{4} << 30;

struct Region {
    uint8_t* data;
    size_t nbytes;
    cudaMemoryType type;  // host: pinned
    int device;
    bool registered;  // somebody else's memory
};

// Thread-safe.
class Memory {
  public:
    // Null: the card has no room.
    void* allocate(size_t nbytes, cudaMemoryType type, int device);
    // Returns false if nothing was allocated there. A guard that was written is a failure of the card, and so is a write to
    // memory that was freed a while ago: it is kept for that, its bytes undefined.
    bool free(void* pointer, cudaMemoryType type);
    cudaError_t add_registered(void* pointer, size_t nbytes);
    bool remove_registered(void* pointer);
    std::optional<Region> find(const void* pointer);
    bool take(int device, size_t nbytes);  // of the card's bytes, for memory that lies elsewhere
    void give_back(int device, size_t nbytes);
    size_t free_bytes(int device);

  private:
    void bury(const Region& region);

    std::mutex mutex_;
    std::map<const uint8_t*, Region> regions_;
    std::deque<Region> freed_;
    size_t freed_bytes_ = 0;
    size_t used_[kNumCards] = {};
};

Memory& memory();
int device();         // of the calling thread
int device_in_use();  // likewise, for a call that makes it a context
bool has_context(int device);
void set_device(int device);

}  // namespace tandem::emulation
