// The threads of a host card: its multiprocessors.
//
// A job runs on all active threads at once; its phases are separated by barriers, so threads are woken once per job and
// not once per phase. Which thread computes which item is not fixed; results must not depend on it.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace tandem {

class Pool;

// One thread's side of a running job.
class Worker {
  public:
    Worker(Pool& pool, int index, int count) : pool_(pool), index_(index), count_(count) {}

    int index() const { return index_; }
    int count() const { return count_; }

    // Calls fn(begin, end) for parts of [0, num_items) of at most `grain` items until all are taken by some thread.
    // Every thread of the job makes the same call; a barrier must stand between two of them.
    template <class Fn>
    void parallel_for(int64_t num_items, int64_t grain, Fn&& fn);

    // Splits so that each thread takes about eight parts.
    template <class Fn>
    void parallel_for(int64_t num_items, Fn&& fn) {
        parallel_for(num_items, std::max<int64_t>(1, num_items / (int64_t{8} * count_)), fn);
    }

    // No thread passes before all have come; the last to come runs `last` first, alone.
    template <class Fn>
    void barrier(Fn&& last);
    void barrier() {
        barrier([] {});
    }

  private:
    Pool& pool_;
    int index_;
    int count_;
};

// Thread rule: `run` by one thread at a time; `hold` and the getters by any.
class Pool {
  public:
    using Job = std::function<void(Worker&)>;

    // `num_threads` counts the thread that calls `run`. Throws std::invalid_argument below 1.
    explicit Pool(int num_threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int num_threads() const { return num_threads_; }
    int num_held() const { return held_.load(std::memory_order_relaxed); }

    // From the next job on, the last `num` threads sit out, asleep. Throws std::invalid_argument unless one thread remains.
    void hold(int num);

    // Runs the job on all active threads and returns when all have left it. The job must not throw.
    void run(const Job& job);

  private:
    friend class Worker;

    // Waits a moment, `spins` counting up from 0: pauses at first, then offers the core to others. A partner that is not
    // running cannot come, so where threads share cores, spinning alone costs whole time slices.
    void rest(int& spins) const;
    void work(int index);
    // Returns when a job in which thread `index` takes part has begun; false when the pool ends.
    bool await_job(int index, uint32_t& seen) const;
    void await_return(uint32_t seen) const;

    const int num_threads_;
    const int pauses_;  // before a waiting thread begins to yield
    std::atomic<int> held_{0};
    std::atomic<bool> stopping_{false};
    const Job* job_ = nullptr;
    // The current job: its number above, how many threads it has in the low bits. Threads that take part sleep on it.
    alignas(64) std::atomic<uint32_t> epoch_;
    std::atomic<uint32_t> returns_{0};         // counts jobs with more threads than the one before; held threads sleep on it
    alignas(64) std::atomic<int> left_{0};     // workers that have left the job
    alignas(64) std::atomic<int> arrived_{0};  // threads at the barrier
    alignas(64) std::atomic<uint32_t> generation_{0};  // counts barriers
    alignas(64) std::atomic<int64_t> next_item_{0};    // of the current parallel_for
    std::vector<std::thread> threads_;
};

template <class Fn>
void Worker::parallel_for(int64_t num_items, int64_t grain, Fn&& fn) {
    for (;;) {
        const int64_t begin = pool_.next_item_.fetch_add(grain, std::memory_order_relaxed);
        if (begin >= num_items) return;
        fn(begin, std::min(begin + grain, num_items));
    }
}

template <class Fn>
void Worker::barrier(Fn&& last) {
    const uint32_t generation = pool_.generation_.load(std::memory_order_acquire);
    if (pool_.arrived_.fetch_add(1, std::memory_order_acq_rel) == count_ - 1) {
        last();
        pool_.next_item_.store(0, std::memory_order_relaxed);
        pool_.arrived_.store(0, std::memory_order_relaxed);
        pool_.generation_.store(generation + 1, std::memory_order_release);
        return;
    }
    int spins = 0;
    while (pool_.generation_.load(std::memory_order_acquire) == generation) pool_.rest(spins);
}

}  // namespace tandem
