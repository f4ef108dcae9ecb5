// A driver with two GPUs in host memory, for tests of the peer check. TEST_DRIVER chooses a fault: denied, dropped, hanging, broken.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <unistd.h>

namespace {
bool fault(const char* name) {
    const char* chosen = std::getenv("TEST_DRIVER");
    return chosen != nullptr && std::strcmp(chosen, name) == 0;
}
int contexts[2] = {1, 2};
void* memory(uint64_t pointer) { return reinterpret_cast<void*>(pointer); }
}  // namespace

extern "C" {
int cuInit(unsigned) { return fault("broken") ? 999 : 0; }
int cuDeviceGet(int* device, int number) {
    *device = number;
    return number < 2 ? 0 : 101;
}
int cuDeviceCanAccessPeer(int* can, int, int) {
    *can = fault("denied") ? 0 : 1;
    return 0;
}
int cuDeviceGetP2PAttribute(int* value, int, int, int) {
    *value = 1;
    return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
    *context = &contexts[device];
    return 0;
}
int cuCtxSetCurrent(void*) { return 0; }
int cuCtxEnablePeerAccess(void*, unsigned) { return 704; }
int cuCtxSynchronize() { return 0; }
int cuMemAlloc_v2(uint64_t* pointer, size_t bytes) {
    *pointer = reinterpret_cast<uint64_t>(std::malloc(bytes));
    return 0;
}
int cuMemcpyHtoD_v2(uint64_t target, const void* source, size_t bytes) {
    std::memcpy(memory(target), source, bytes);
    return 0;
}
int cuMemcpyDtoH_v2(void* target, uint64_t source, size_t bytes) {
    std::memcpy(target, memory(source), bytes);
    return 0;
}
int cuMemcpyPeer(uint64_t target, void*, uint64_t source, void*, size_t bytes) {
    if (fault("hanging")) pause();
    std::memcpy(memory(target), memory(source), fault("dropped") ? bytes - 1 : bytes);
    return 0;
}
}
