// Streams: jobs in order, each stream on a thread of its own; captures and the graphs made of them.
#pragma once
#include <cuda_runtime.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace tandem::emulation {

using Job = std::function<void()>;

// How many jobs of each capturing stream come before a point.
using Clock = std::map<const CUstream_st*, uint64_t>;

// Jobs of all streams that take part, in the order in which they were enqueued.
struct Capture {
    const CUstream_st* origin;
    std::vector<Job> jobs;
    Clock issued;
    std::vector<CUstream_st*> streams;
};

// The error that stays, and what every call answers once it is there.
class Health {
  public:
    void fail(const std::string& message);
    void reset();
    bool failed() const;
    std::string message() const;
    // Cards that hang begin nothing new.
    void set_hanging(bool hangs) { hangs_ = hangs; }
    bool hangs() const { return hangs_; }

  private:
    mutable std::mutex mutex_;
    std::optional<std::string> message_;
    std::atomic<bool> hangs_{false};
};

Health& health();

void poll_until(const std::function<bool()>& done);

}  // namespace tandem::emulation

// Thread-safe but for the capture, which belongs to the thread that captures.
struct CUstream_st : std::enable_shared_from_this<CUstream_st> {
    using Job = tandem::emulation::Job;

    // The stream of a handle; null and the two special handles mean the default stream. Null: there is no such stream.
    static std::shared_ptr<CUstream_st> of(cudaStream_t handle);
    static cudaStream_t create();
    static bool destroy(cudaStream_t handle);
    static std::vector<std::shared_ptr<CUstream_st>> all();

    int device = 0;

    void enqueue(Job job);  // into the capture, if there is one
    void wait_idle();
    bool idle();

    std::shared_ptr<tandem::emulation::Capture> capture;
    tandem::emulation::Clock clock;  // what this stream's next captured job comes after

  private:
    void start_thread();
    void work();

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Job> jobs_;
    bool busy_ = false, closed_ = false, started_ = false;
};

struct CUevent_st {
    struct State {
        std::mutex mutex;
        std::condition_variable changed;
        uint64_t num_recorded = 0, num_passed = 0;
        double passed_s = 0;

        void pass(uint64_t number);
        void wait(uint64_t number);
        bool passed();
    };
    std::shared_ptr<State> state = std::make_shared<State>();
    std::weak_ptr<tandem::emulation::Capture> capture;  // of the last record, if it was captured
    tandem::emulation::Clock clock;
};

struct CUgraph_st {
    std::vector<tandem::emulation::Job> jobs;
};
struct CUgraphExec_st {
    std::shared_ptr<const std::vector<tandem::emulation::Job>> jobs;
};
