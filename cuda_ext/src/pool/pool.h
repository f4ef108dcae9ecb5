// The threads of a host card: its multiprocessors.
//
// One thread drives: it runs code in order and shares out the loops in it. A loop is a phase. Its parts stand on counters, one for
// eight threads, since claiming from a word that all threads watch takes as long as some parts do; who has emptied its own counter
// goes on at the others.
//
//   ticket   of a counter: its last part << 32 | next part. A thread that sees a part left adds 1; the value that it gets back,
//            not the one that it saw, says which part it has, or that there was none.
//   phase    what the loop calls: written before the tickets, read only by who has claimed a part. A phase cannot end while
//            a claimed part is not done, so a thread that comes late never takes one phase's part with another's call.
//   done     parts done by others than the driver, by the counter of who did them; a thread adds up its own and puts them there
//            when it finds no further one.
//
// Nothing waits for all threads: one that the system does not let run holds up the part that it has claimed, no other.
// Which thread computes which item is not fixed; results must not depend on it.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

namespace tandem {

// Thread rule: `parallel_for` by one thread at a time, which drives; `hold` and the getters by any.
class Pool {
  public:
    // `num_threads` counts the thread that drives. Throws std::invalid_argument below 1.
    explicit Pool(int num_threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int num_threads() const { return num_threads_; }
    int num_held() const { return held_.load(std::memory_order_relaxed); }
    // Threads that take parts now.
    int num_active() const { return num_threads_ - num_held(); }

    // From the next loop on, the last `num` threads sit out, asleep. Throws std::invalid_argument unless one thread remains.
    void hold(int num);

    // Calls fn(begin, end) for parts of [0, num_items) of `grain` items (fewer than 2^32 parts), on whatever threads have
    // time, and returns when all are done. Where one thread is to do it all, there may be one part of all items.
    // fn must not throw, and must not call this.
    template <class Fn>
    void parallel_for(int64_t num_items, int64_t grain, Fn&& fn);

    // About eight parts for each thread: for items that take microseconds.
    template <class Fn>
    void parallel_for(int64_t num_items, Fn&& fn) {
        parallel_for(num_items, grain_of(num_items, 8), std::forward<Fn>(fn));
    }

    // So many items that each thread has about `parts` parts.
    int64_t grain_of(int64_t num_items, int parts) const {
        return std::max<int64_t>(1, num_items / (int64_t{parts} * num_active()));
    }

  private:
    struct Phase {
        void (*call)(void* context, int64_t begin, int64_t end);
        void* context;
        int64_t num_items;
        int64_t grain;
    };

    // Where the parts of a phase are claimed, each word by other threads. The lower half of `ticket` may run beyond the upper.
    struct Counter {
        alignas(64) std::atomic<uint64_t> ticket{0};
        alignas(64) std::atomic<uint32_t> done{0};
    };

    void run(const Phase& phase);
    // Claims and does parts until there is none; returns how many. `index`: of the thread. Where its own counter had none it looks
    // at the others only if `everywhere`: words that all threads watch are slow to claim from.
    uint32_t take_parts(int index, bool everywhere);
    uint32_t take_parts(Counter& counter);
    size_t num_counters_used() const;  // by the threads that are active
    size_t counter_of(int index) const;
    bool has_parts() const;
    uint32_t num_done() const;
    void work(int index);
    void sleep();
    void sleep_while_held(int index);
    // Waits a moment, `spins` counting up from 0: pauses at first, then offers the core to others. A partner that is not
    // running cannot finish, so where threads share cores, spinning alone costs whole time slices.
    void rest(int& spins) const;

    const int num_threads_;
    const int pauses_;  // before a waiting thread begins to yield
    // Seldom written.
    std::atomic<int> held_{0};
    std::atomic<bool> stopping_{false};
    std::atomic<bool> asleep_{false};        // set before a thread sleeps, cleared by who wakes
    std::atomic<uint32_t> wakes_{0};         // threads without work sleep on it
    std::atomic<uint32_t> hold_changes_{0};  // held threads sleep on it
    // Written in every phase, each by other threads.
    alignas(64) Phase phase_{};
    alignas(64) std::vector<Counter> counters_;
    std::vector<std::thread> threads_;
};

template <class Fn>
void Pool::parallel_for(int64_t num_items, int64_t grain, Fn&& fn) {
    using Callable = std::remove_reference_t<Fn>;
    if (num_items <= 0) return;
    if (num_items <= grain || num_active() == 1) {
        fn(int64_t{0}, num_items);
        return;
    }
    void* context = const_cast<void*>(static_cast<const void*>(std::addressof(fn)));
    run({[](void* fn, int64_t begin, int64_t end) { (*static_cast<Callable*>(fn))(begin, end); }, context, num_items, grain});
}

}  // namespace tandem
