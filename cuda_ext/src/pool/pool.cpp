#include "pool/pool.h"

#include <sched.h>

#include <string>

#include "base/require.h"

#ifdef TANDEM_X86
#include <immintrin.h>
#endif

namespace tandem {

namespace {

constexpr int kMaxThreads = 1024;
constexpr int kThreadsPerCounter = 8;
constexpr int kSpinsPerRound = 8;  // of a thread without work, until it looks at all counters
constexpr int kPauses = 4000;      // about 40 us
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

uint64_t new_ticket(uint64_t begin, uint64_t end) {
    return end << 32 | begin;
}
uint32_t next_part(uint64_t ticket) {
    return static_cast<uint32_t>(ticket);
}
bool has_part(uint64_t ticket) {
    return next_part(ticket) < ticket >> 32;
}

}  // namespace

Pool::Pool(int num_threads) : num_threads_(num_threads), pauses_(num_threads > usable_cores() ? kPausesOnSharedCores : kPauses) {
    require(num_threads >= 1 && num_threads <= kMaxThreads, "a pool of " + std::to_string(num_threads) +
                                                                " threads was asked for; 1 to " + std::to_string(kMaxThreads) +
                                                                " are possible");
    counters_ = std::vector<Counter>(num_counters_used());
    threads_.reserve(num_threads - 1);
    for (int index = 1; index < num_threads; index++) threads_.emplace_back([this, index] { work(index); });
}

Pool::~Pool() {
    stopping_.store(true);
    for (std::atomic<uint32_t>* word : {&wakes_, &hold_changes_}) {
        word->fetch_add(1);
        word->notify_all();
    }
    for (std::thread& thread : threads_) thread.join();
}

void Pool::hold(int num) {
    require(num >= 0 && num < num_threads_,
            "cannot hold " + std::to_string(num) + " of " + std::to_string(num_threads_) + " threads; at least one must go on");
    held_.store(num);
    hold_changes_.fetch_add(1);
    hold_changes_.notify_all();
}

void Pool::run(const Phase& phase) {
    const auto num_parts = static_cast<uint32_t>((phase.num_items + phase.grain - 1) / phase.grain);
    phase_ = phase;
    for (Counter& counter : counters_) counter.done.store(0, std::memory_order_relaxed);
    const size_t num_counters = num_counters_used();
    uint64_t begin = 0;
    for (size_t i = 0; i < num_counters; i++) {
        const uint64_t end = num_parts * (i + 1) / num_counters;
        counters_[i].ticket.store(new_ticket(begin, end), std::memory_order_release);  // publishes all of the above
        begin = end;
    }
    std::atomic_thread_fence(std::memory_order_seq_cst);
    // Either this sees that a thread is about to sleep, or that thread sees the tickets.
    if (asleep_.load() && asleep_.exchange(false)) {
        wakes_.fetch_add(1);
        wakes_.notify_all();
    }
    const uint32_t of_others = num_parts - take_parts(0, true);
    for (int spins = 0; num_done() != of_others;) rest(spins);
}

uint32_t Pool::take_parts(int index, bool everywhere) {
    const size_t own = counter_of(index);
    uint32_t num_done = take_parts(counters_[own]);
    if (num_done == 0 && !everywhere) return 0;
    for (size_t i = 1; i < counters_.size(); i++) num_done += take_parts(counters_[(own + i) % counters_.size()]);
    return num_done;
}

uint32_t Pool::take_parts(Counter& counter) {
    if (!has_part(counter.ticket.load(std::memory_order_relaxed))) return 0;
    uint64_t ticket = counter.ticket.fetch_add(1, std::memory_order_acquire);
    if (!has_part(ticket)) return 0;
    const Phase phase = phase_;
    uint32_t num_done = 0;
    do {
        const int64_t begin = next_part(ticket) * phase.grain;
        phase.call(phase.context, begin, std::min(begin + phase.grain, phase.num_items));
        num_done++;
        ticket = counter.ticket.load(std::memory_order_relaxed);
        if (has_part(ticket)) ticket = counter.ticket.fetch_add(1, std::memory_order_relaxed);  // still of this phase
    } while (has_part(ticket));
    return num_done;
}

size_t Pool::num_counters_used() const {
    return static_cast<size_t>(num_active() + kThreadsPerCounter - 1) / kThreadsPerCounter;
}

size_t Pool::counter_of(int index) const {
    return static_cast<size_t>(index) % num_counters_used();
}

bool Pool::has_parts() const {
    return std::any_of(counters_.begin(), counters_.end(), [](const Counter& counter) { return has_part(counter.ticket.load()); });
}

uint32_t Pool::num_done() const {
    uint32_t num = 0;
    for (const Counter& counter : counters_) num += counter.done.load(std::memory_order_acquire);
    return num;
}

void Pool::work(int index) {
    for (int spins = 0; !stopping_.load(std::memory_order_relaxed);) {
        if (index >= num_active()) {
            sleep_while_held(index);
        } else if (const uint32_t num_done = take_parts(index, spins % kSpinsPerRound == kSpinsPerRound - 1)) {
            counters_[counter_of(index)].done.fetch_add(num_done, std::memory_order_release);
            spins = 0;
        } else if (spins < kRestsBeforeSleep) {
            rest(spins);
        } else {
            sleep();
            spins = 0;
        }
    }
}

void Pool::sleep() {
    const uint32_t seen = wakes_.load();  // before the flag: who sees the flag changes this
    asleep_.store(true);
    if (!has_parts() && !stopping_.load()) wakes_.wait(seen);
}

void Pool::sleep_while_held(int index) {
    const uint32_t seen = hold_changes_.load();
    if (index >= num_threads_ - held_.load() && !stopping_.load()) hold_changes_.wait(seen);
}

void Pool::rest(int& spins) const {
    if (spins++ < pauses_) {
        pause();
    } else {
        std::this_thread::yield();
    }
}

}  // namespace tandem
