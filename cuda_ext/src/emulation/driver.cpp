// The driver's calls: waits for values in memory, and memory whose addresses and pages come separately.
#include <cuda.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <string_view>

#include "emulation/memory.h"
#include "emulation/stream.h"

using namespace tandem::emulation;

namespace {

constexpr size_t kGranularity = size_t{2} << 20;

struct Pages {
    int file;
    size_t nbytes;
    int device;
    int num_users;  // the handle and each mapping
};

// Thread-safe.
class PhysicalMemory {
  public:
    CUmemGenericAllocationHandle create(size_t nbytes, int device) {
        if (!memory().take(device, nbytes)) return 0;
        const int file = memfd_create("emulated-card", MFD_CLOEXEC);
        if (file < 0 || ftruncate(file, static_cast<off_t>(nbytes)) != 0) {
            if (file >= 0) close(file);
            memory().give_back(device, nbytes);
            return 0;
        }
        std::lock_guard lock(mutex_);
        pages_[++last_] = {file, nbytes, device, 1};
        return last_;
    }
    bool map(uint8_t* address, size_t nbytes, CUmemGenericAllocationHandle handle) {
        std::lock_guard lock(mutex_);
        const auto found = pages_.find(handle);
        if (found == pages_.end() || nbytes != found->second.nbytes || mapped_.contains(address)) return false;
        if (mmap(address, nbytes, PROT_NONE, MAP_SHARED | MAP_FIXED, found->second.file, 0) == MAP_FAILED) return false;
        found->second.num_users++;
        mapped_[address] = handle;
        return true;
    }
    bool unmap(uint8_t* address, size_t nbytes) {
        std::lock_guard lock(mutex_);
        const auto found = mapped_.find(address);
        if (found == mapped_.end() || pages_[found->second].nbytes != nbytes) return false;
        mmap(address, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        drop(found->second);
        mapped_.erase(found);
        return true;
    }
    bool release(CUmemGenericAllocationHandle handle) {
        std::lock_guard lock(mutex_);
        if (!pages_.contains(handle)) return false;
        drop(handle);
        return true;
    }

  private:
    void drop(CUmemGenericAllocationHandle handle) {
        Pages& pages = pages_[handle];
        if (--pages.num_users > 0) return;
        close(pages.file);
        memory().give_back(pages.device, pages.nbytes);
        pages_.erase(handle);
    }

    std::mutex mutex_;
    CUmemGenericAllocationHandle last_ = 0;
    std::map<CUmemGenericAllocationHandle, Pages> pages_;
    std::map<uint8_t*, CUmemGenericAllocationHandle> mapped_;
};

PhysicalMemory& physical() {
    static auto* physical = new PhysicalMemory;
    return *physical;
}

uint8_t* pointer(CUdeviceptr address) {
    return reinterpret_cast<uint8_t*>(static_cast<uintptr_t>(address));
}

bool satisfied(uint32_t found, uint32_t value, unsigned flags) {
    switch (flags) {
        case CU_STREAM_WAIT_VALUE_GEQ:
            return static_cast<int32_t>(found - value) >= 0;
        case CU_STREAM_WAIT_VALUE_EQ:
            return found == value;
        case CU_STREAM_WAIT_VALUE_AND:
            return (found & value) != 0;
        default:
            return ~(found | value) != 0;
    }
}

}  // namespace

CUresult cuStreamWaitValue32(CUstream handle, CUdeviceptr address, cuuint32_t value, unsigned flags) {
    const auto stream = CUstream_st::of(handle);
    if (!stream || address % sizeof value != 0) return CUDA_ERROR_INVALID_VALUE;
    const auto* word = reinterpret_cast<const uint32_t*>(pointer(address));
    stream->enqueue(
        [=] { poll_until([=] { return satisfied(__atomic_load_n(word, __ATOMIC_ACQUIRE), value, flags) || health().failed(); }); });
    return CUDA_SUCCESS;
}

CUresult cuStreamWriteValue32(CUstream handle, CUdeviceptr address, cuuint32_t value, unsigned) {
    const auto stream = CUstream_st::of(handle);
    if (!stream || address % sizeof value != 0) return CUDA_ERROR_INVALID_VALUE;
    auto* word = reinterpret_cast<uint32_t*>(pointer(address));
    stream->enqueue([=] { __atomic_store_n(word, value, __ATOMIC_RELEASE); });
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice number, unsigned* flags, int* active) {
    if (number < 0 || number >= kNumCards) return CUDA_ERROR_INVALID_VALUE;
    *flags = 0;
    *active = has_context(number);
    return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
    *granularity = kGranularity;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr* address, size_t nbytes, size_t alignment, CUdeviceptr, unsigned long long) {
    if (nbytes == 0 || nbytes % kGranularity != 0 || alignment > kGranularity) return CUDA_ERROR_INVALID_VALUE;
    void* found = mmap(nullptr, nbytes + kGranularity, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    const auto start = reinterpret_cast<uintptr_t>(found), aligned = (start + kGranularity - 1) / kGranularity * kGranularity;
    if (aligned > start) munmap(found, aligned - start);
    if (aligned < start + kGranularity) munmap(reinterpret_cast<void*>(aligned + nbytes), start + kGranularity - aligned);
    *address = aligned;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t nbytes) {
    return munmap(pointer(address), nbytes) == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t nbytes, const CUmemAllocationProp* place, unsigned long long) {
    if (nbytes == 0 || nbytes % kGranularity != 0 || place->location.id < 0 || place->location.id >= kNumCards)
        return CUDA_ERROR_INVALID_VALUE;
    *handle = physical().create(nbytes, place->location.id);
    return *handle == 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    return physical().release(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemMap(CUdeviceptr address, size_t nbytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long) {
    if (offset != 0 || address % kGranularity != 0) return CUDA_ERROR_INVALID_VALUE;
    return physical().map(pointer(address), nbytes, handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t nbytes) {
    cudaDeviceSynchronize();
    return physical().unmap(pointer(address), nbytes) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t nbytes, const CUmemAccessDesc* access, size_t num_access) {
    int protection = PROT_NONE;
    for (size_t i = 0; i < num_access; i++) {
        if (access[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE) protection |= PROT_READ | PROT_WRITE;
        if (access[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READ) protection |= PROT_READ;
    }
    return mprotect(pointer(address), nbytes, protection) == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
    struct Entry {
        std::string_view name;
        void* function;
    };
#define ENTRY(name)                             \
    Entry {                                     \
        #name, reinterpret_cast<void*>(&(name)) \
    }
    static const Entry entries[] = {ENTRY(cuStreamWaitValue32),
                                    ENTRY(cuStreamWriteValue32),
                                    ENTRY(cuDevicePrimaryCtxGetState),
                                    ENTRY(cuMemGetAllocationGranularity),
                                    ENTRY(cuMemAddressReserve),
                                    ENTRY(cuMemAddressFree),
                                    ENTRY(cuMemCreate),
                                    ENTRY(cuMemRelease),
                                    ENTRY(cuMemMap),
                                    ENTRY(cuMemUnmap),
                                    ENTRY(cuMemSetAccess)};
#undef ENTRY
    const auto* found =
        std::find_if(std::begin(entries), std::end(entries), [&](const Entry& entry) { return entry.name == symbol; });
    *function = found == std::end(entries) ? nullptr : found->function;
    if (result != nullptr) *result = *function == nullptr ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
    return *function == nullptr && result == nullptr ? cudaErrorNotSupported : cudaSuccess;
}
