// A thread that runs commands in order: the host twin of a stream.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

namespace tandem {

// Names a command; a later command has a greater ticket. 0 names the beginning and is always done.
using Ticket = uint64_t;

// Thread-safe.
class CommandQueue {
  public:
    CommandQueue();
    // Runs what has been pushed, then ends.
    ~CommandQueue();
    CommandQueue(const CommandQueue&) = delete;
    CommandQueue& operator=(const CommandQueue&) = delete;

    Ticket push(std::function<void()> command);
    bool done(Ticket ticket) const;
    // Returns when the command has run; throws what it threw.
    void wait(Ticket ticket);

  private:
    void work();

    mutable std::mutex mutex_;
    std::condition_variable pushed_;
    std::condition_variable finished_;
    std::deque<std::function<void()>> commands_;
    std::map<Ticket, std::exception_ptr> failures_;
    Ticket last_pushed_ = 0;
    Ticket last_done_ = 0;
    bool ending_ = false;
    std::thread thread_;
};

}  // namespace tandem
