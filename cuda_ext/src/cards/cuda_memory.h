// The kinds of memory that a CUDA card works with. All calls are made with the card's device current.
#pragma once
#include <memory>
#include <vector>

#include "base/buffer.h"

namespace tandem {

// On the card, zeroed. Throws std::bad_alloc.
std::shared_ptr<Buffer> allocate_device(size_t nbytes);

// In the host, pinned, zeroed and readable from the card at the same address. Throws std::bad_alloc.
std::shared_ptr<Buffer> allocate_mapped(size_t nbytes);

// On the card, in segments that can be given back and taken again at the same addresses (CUDA's virtual memory management).
// Not `present`: the segments have no memory at first. `sharers`: other devices that may use them. Throws std::bad_alloc.
std::shared_ptr<Buffer> allocate_segments(int device, size_t nbytes, bool present, const std::vector<int>& sharers);

// Host memory of somebody else, pinned in steps as far as the system allows; the rest stays pageable.
class PinnedRange {
  public:
    static constexpr size_t kStepBytes = size_t{1} << 30;

    // `data` stays mapped for as long as the object lives.
    PinnedRange(std::byte* data, size_t nbytes);
    ~PinnedRange();
    PinnedRange(const PinnedRange&) = delete;
    PinnedRange& operator=(const PinnedRange&) = delete;

    size_t pinned_bytes() const { return pinned_bytes_; }
    // Whether kernels may read every byte of a part in place.
    bool is_pinned(const std::byte* part, size_t nbytes) const;
    // How many bytes from `part` on can be copied in one go: a copy must not cross the border of a step.
    size_t copyable_bytes(const std::byte* part) const;

  private:
    std::byte* data_;
    size_t nbytes_;
    size_t pinned_bytes_ = 0;  // from the beginning on
};

}  // namespace tandem
