#include "cards/cuda_driver.h"

#include "cards/cuda_check.h"

namespace tandem {

namespace {

template <class Function>
void look_up(Function& function, const char* name) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    CUDA_CHECK(cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result));
    if (result != cudaDriverEntryPointSuccess || found == nullptr)
        throw CudaError(cudaErrorNotSupported, std::string("the driver has no ") + name);
    function = reinterpret_cast<Function>(found);
}

Driver look_up_all() {
    Driver found{};
    look_up(found.primary_context_state, "cuDevicePrimaryCtxGetState");
    look_up(found.mem_address_reserve, "cuMemAddressReserve");
    look_up(found.mem_address_free, "cuMemAddressFree");
    look_up(found.mem_create, "cuMemCreate");
    look_up(found.mem_release, "cuMemRelease");
    look_up(found.mem_map, "cuMemMap");
    look_up(found.mem_unmap, "cuMemUnmap");
    look_up(found.mem_set_access, "cuMemSetAccess");
    look_up(found.stream_wait_value, "cuStreamWaitValue32");
    return found;
}

}  // namespace

const Driver& driver() {
    static const Driver found = look_up_all();
    return found;
}

bool has_context(int device) {
    unsigned flags = 0;
    int active = 0;
    CUDA_DRIVER_CHECK(driver().primary_context_state(device, &flags, &active));
    return active != 0;
}

}  // namespace tandem
