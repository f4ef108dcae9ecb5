#include "link/wait.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <climits>
#include <ctime>
#include <thread>

#ifdef TANDEM_X86
#include <immintrin.h>
#endif

namespace tandem::link {

namespace {

constexpr int kPauses = 1000;  // about 10 us
constexpr timespec kSleep{0, 10'000'000};

}  // namespace

void rest(int& spins) {
    if (spins++ >= kPauses) {
        std::this_thread::yield();
        return;
    }
#ifdef TANDEM_X86
    _mm_pause();
#endif
}

void sleep_on(uint32_t& word, uint32_t seen) {
    syscall(SYS_futex, &word, FUTEX_WAIT, seen, &kSleep, nullptr, 0);
}

void wake(uint32_t& word) {
    syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace tandem::link
