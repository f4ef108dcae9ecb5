#include "pool/pool.h"

#include <sched.h>

#include <string>

#include "base/require.h"

#ifdef TANDEM_X86
#include <immintrin.h>
#endif

namespace tandem {

namespace {

constexpr uint32_t kActiveMask = 0xfff;
constexpr uint32_t kNextEpoch = kActiveMask + 1;
constexpr int kMaxThreads = 1024;
constexpr int kPauses = 4000;  // about 40 us
constexpr int kPausesOnSharedCores = 50;
constexpr int kRestsBeforeSleep = 6000;  // about a millisecond: longer than the host needs between two windows

int usable_cores() {
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
    return std::max(1, CPU_COUNT(&set));
}

void pause() {
#ifdef TANDEM_X86
    _mm_pause();
#endif
}

}  // namespace

Pool::Pool(int num_threads)
    : num_threads_(num_threads), pauses_(num_threads > usable_cores() ? kPausesOnSharedCores : kPauses), epoch_(num_threads) {
    require(num_threads >= 1 && num_threads <= kMaxThreads, "a pool of " + std::to_string(num_threads) +
                                                                " threads was asked for; 1 to " + std::to_string(kMaxThreads) +
                                                                " are possible");
    threads_.reserve(num_threads - 1);
    for (int index = 1; index < num_threads; index++) threads_.emplace_back([this, index] { work(index); });
}

Pool::~Pool() {
    stopping_.store(true);
    epoch_.fetch_add(kNextEpoch);
    epoch_.notify_all();
    returns_.fetch_add(1);
    returns_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

void Pool::hold(int num) {
    require(num >= 0 && num < num_threads_,
            "cannot hold " + std::to_string(num) + " of " + std::to_string(num_threads_) + " threads; at least one must go on");
    held_.store(num, std::memory_order_relaxed);
}

void Pool::run(const Job& job) {
    const uint32_t before = epoch_.load(std::memory_order_relaxed);
    const uint32_t active = num_threads_ - held_.load(std::memory_order_relaxed);
    job_ = &job;
    next_item_.store(0, std::memory_order_relaxed);
    left_.store(0, std::memory_order_relaxed);
    epoch_.store((before & ~kActiveMask) + kNextEpoch + active);  // publishes all of the above
    if (active > 1) epoch_.notify_all();
    if (active > (before & kActiveMask)) {
        returns_.fetch_add(1);
        returns_.notify_all();
    }
    Worker self(*this, 0, active);
    job(self);
    int spins = 0;
    while (left_.load(std::memory_order_acquire) != static_cast<int>(active) - 1) rest(spins);
}

void Pool::work(int index) {
    uint32_t seen = num_threads_;
    while (await_job(index, seen)) {
        Worker self(*this, index, seen & kActiveMask);
        (*job_)(self);
        left_.fetch_add(1, std::memory_order_release);
    }
}

bool Pool::await_job(int index, uint32_t& seen) const {
    for (int spins = 0;;) {
        const uint32_t epoch = epoch_.load();
        if (stopping_.load()) return false;
        if (epoch != seen) {
            seen = epoch;
            if (index < static_cast<int>(epoch & kActiveMask)) return true;
            await_return(epoch);
        } else if (spins < kRestsBeforeSleep) {
            rest(spins);
        } else {
            epoch_.wait(seen);
        }
    }
}

void Pool::await_return(uint32_t seen) const {
    const uint32_t returns = returns_.load();
    if (epoch_.load() == seen) returns_.wait(returns);
}

void Pool::rest(int& spins) const {
    if (spins++ < pauses_) {
        pause();
    } else {
        std::this_thread::yield();
    }
}

}  // namespace tandem
