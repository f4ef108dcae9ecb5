// The driver functions that the runtime does not wrap, looked up at run time: the module loads where there is no driver.
#pragma once
#include <cuda.h>

namespace tandem {

struct Driver {
    decltype(&cuDevicePrimaryCtxGetState) primary_context_state;
    decltype(&cuMemAddressReserve) mem_address_reserve;
    decltype(&cuMemAddressFree) mem_address_free;
    decltype(&cuMemCreate) mem_create;
    decltype(&cuMemRelease) mem_release;
    decltype(&cuMemMap) mem_map;
    decltype(&cuMemUnmap) mem_unmap;
    decltype(&cuMemSetAccess) mem_set_access;
    decltype(&cuStreamWaitValue32) stream_wait_value;
};

// Throws CudaError if the driver lacks one of them.
const Driver& driver();

// Whether this process has a context on that GPU, which takes about half a gigabyte there.
bool has_context(int device);

}  // namespace tandem
