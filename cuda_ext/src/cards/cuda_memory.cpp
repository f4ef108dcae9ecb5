#include "cards/cuda_memory.h"

#include <algorithm>

#include "base/require.h"
#include "cards/cuda_check.h"
#include "cards/cuda_driver.h"

namespace tandem {

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kSegmentBytes = size_t{64} << 20;

class DeviceBuffer final : public Buffer {
  public:
    DeviceBuffer(void* data, size_t nbytes) : Buffer(data, nbytes) {}
    ~DeviceBuffer() override { cudaFree(data()); }
    bool on_host() const override { return false; }
};

class MappedBuffer final : public Buffer {
  public:
    MappedBuffer(void* data, size_t nbytes) : Buffer(data, nbytes) {}
    ~MappedBuffer() override { cudaFreeHost(data()); }
};

// A reserved range of addresses, cut into segments that have memory or not.
class SegmentedBuffer final : public Buffer {
  public:
    // `used_bytes`: what was asked for; nobody needs the rest of the last segment.
    SegmentedBuffer(int device, CUdeviceptr base, size_t nbytes, size_t used_bytes, size_t segment_bytes,
                    const std::vector<int>& sharers)
        : Buffer(reinterpret_cast<void*>(base), nbytes),
          device_(device),
          used_bytes_(used_bytes),
          segment_bytes_(segment_bytes),
          handles_(nbytes / segment_bytes, 0) {
        add_user(device);
        for (const int sharer : sharers) add_user(sharer);
    }
    ~SegmentedBuffer() override {
        for (size_t segment = 0; segment < handles_.size(); segment++) unmap(segment);
        driver().mem_address_free(address(0), nbytes());
    }
    bool on_host() const override { return false; }

    // Segments that a part touches only at its edges stay: somebody else may live in the rest of them.
    void discard(size_t offset, size_t nbytes) override {
        check_part(offset, nbytes);
        discarded_.push_back({offset, offset + nbytes});
        merge_discarded();
        for (size_t segment = 0; segment < handles_.size(); segment++)
            if (is_discarded(segment)) unmap(segment);
    }

    void touch(size_t offset, size_t nbytes) override {
        check_part(offset, nbytes);
        for (size_t segment = offset / segment_bytes_; segment * segment_bytes_ < offset + nbytes; segment++) map(segment);
        keep_discarded_outside(offset, offset + nbytes);
    }

  private:
    struct Range {
        size_t begin, end;
    };

    CUdeviceptr address(size_t segment) const { return reinterpret_cast<CUdeviceptr>(data()) + segment * segment_bytes_; }

    void add_user(int device) {
        CUmemAccessDesc access{};
        access.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
        access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        users_.push_back(access);
    }

    void map(size_t segment) {
        if (handles_[segment] != 0) return;
        CUmemAllocationProp place{};
        place.type = CU_MEM_ALLOCATION_TYPE_PINNED;
        place.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
        place.location.id = device_;
        CUmemGenericAllocationHandle handle{};
        CUDA_DRIVER_CHECK(driver().mem_create(&handle, segment_bytes_, &place, 0));
        try {
            CUDA_DRIVER_CHECK(driver().mem_map(address(segment), segment_bytes_, 0, handle, 0));
        } catch (...) {
            driver().mem_release(handle);
            throw;
        }
        handles_[segment] = handle;
        CUDA_DRIVER_CHECK(driver().mem_set_access(address(segment), segment_bytes_, users_.data(), users_.size()));
    }

    void unmap(size_t segment) {
        if (handles_[segment] == 0) return;
        driver().mem_unmap(address(segment), segment_bytes_);
        driver().mem_release(handles_[segment]);
        handles_[segment] = 0;
    }

    bool is_discarded(size_t segment) const {
        const size_t begin = segment * segment_bytes_, end = std::min(begin + segment_bytes_, used_bytes_);
        return std::any_of(discarded_.begin(), discarded_.end(),
                           [&](const Range& range) { return range.begin <= begin && end <= range.end; });
    }

    void merge_discarded() {
        std::sort(discarded_.begin(), discarded_.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
        std::vector<Range> merged;
        for (const Range& range : discarded_) {
            if (!merged.empty() && range.begin <= merged.back().end) {
                merged.back().end = std::max(merged.back().end, range.end);
            } else {
                merged.push_back(range);
            }
        }
        discarded_ = std::move(merged);
    }

    void keep_discarded_outside(size_t begin, size_t end) {
        std::vector<Range> kept;
        for (const Range& range : discarded_) {
            if (range.begin < std::min(range.end, begin)) kept.push_back({range.begin, std::min(range.end, begin)});
            if (std::max(range.begin, end) < range.end) kept.push_back({std::max(range.begin, end), range.end});
        }
        discarded_ = std::move(kept);
    }

    int device_;
    size_t used_bytes_;
    size_t segment_bytes_;
    std::vector<CUmemAccessDesc> users_;
    std::vector<CUmemGenericAllocationHandle> handles_;  // 0: the segment has no memory
    std::vector<Range> discarded_;                       // sorted, disjoint parts that nobody needs
};

size_t round_up(size_t value, size_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

std::shared_ptr<Buffer> allocate_device(size_t nbytes) {
    require(nbytes > 0, "a buffer of 0 bytes was asked for");
    void* data = nullptr;
    check_allocation(cudaMalloc(&data, nbytes), "cudaMalloc");
    auto buffer = std::make_shared<DeviceBuffer>(data, nbytes);
    CUDA_CHECK(cudaMemset(data, 0, nbytes));
    CUDA_CHECK(cudaStreamSynchronize(nullptr));  // the card's own streams do not wait for the null stream
    return buffer;
}

std::shared_ptr<Buffer> allocate_mapped(size_t nbytes) {
    require(nbytes > 0, "a buffer of 0 bytes was asked for");
    void* data = nullptr;
    check_allocation(cudaHostAlloc(&data, nbytes, cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
    std::fill_n(static_cast<std::byte*>(data), nbytes, std::byte{0});
    return std::make_shared<MappedBuffer>(data, nbytes);
}

std::shared_ptr<Buffer> allocate_segments(int device, size_t nbytes, bool present, const std::vector<int>& sharers) {
    require(nbytes > 0, "a buffer of 0 bytes was asked for");
    const size_t segment_bytes = nbytes < kSegmentBytes ? round_up(nbytes, size_t{2} << 20) : kSegmentBytes;
    const size_t reserved = round_up(nbytes, segment_bytes);
    CUdeviceptr base = 0;
    CUDA_DRIVER_CHECK(driver().mem_address_reserve(&base, reserved, 0, 0, 0));
    auto buffer = std::make_shared<SegmentedBuffer>(device, base, reserved, nbytes, segment_bytes, sharers);
    if (present) buffer->touch(0, reserved);
    return buffer;
}

PinnedRange::PinnedRange(std::byte* data, size_t nbytes) : data_(data), nbytes_(nbytes) {
    const size_t whole = round_up(nbytes, kPage);
    while (pinned_bytes_ < whole) {
        const size_t step = std::min(kStepBytes, whole - pinned_bytes_);
        // Read-only mappings need the flag where the system has it; elsewhere the caller maps the file writable.
        if (cudaHostRegister(data + pinned_bytes_, step, cudaHostRegisterMapped | cudaHostRegisterPortable) != cudaSuccess) {
            cudaGetLastError();  // pageable memory goes on working
            break;
        }
        pinned_bytes_ += step;
    }
}

PinnedRange::~PinnedRange() {
    for (size_t at = 0; at < pinned_bytes_; at += kStepBytes) cudaHostUnregister(data_ + at);
}

bool PinnedRange::is_pinned(const std::byte* part, size_t nbytes) const {
    return part >= data_ && static_cast<size_t>(part - data_) + nbytes <= pinned_bytes_;
}

size_t PinnedRange::copyable_bytes(const std::byte* part) const {
    const size_t at = static_cast<size_t>(part - data_);
    if (part < data_ || at >= pinned_bytes_) return SIZE_MAX;
    return kStepBytes - at % kStepBytes;
}

}  // namespace tandem
