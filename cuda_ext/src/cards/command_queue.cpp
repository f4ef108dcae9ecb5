#include "cards/command_queue.h"

#include <string>

#include "base/require.h"

namespace tandem {

CommandQueue::CommandQueue() : thread_([this] { work(); }) {}

CommandQueue::~CommandQueue() {
    {
        std::lock_guard lock(mutex_);
        ending_ = true;
    }
    pushed_.notify_one();
    thread_.join();
}

Ticket CommandQueue::push(std::function<void()> command) {
    Ticket ticket;
    {
        std::lock_guard lock(mutex_);
        commands_.push_back(std::move(command));
        ticket = ++last_pushed_;
    }
    pushed_.notify_one();
    return ticket;
}

bool CommandQueue::done(Ticket ticket) const {
    std::lock_guard lock(mutex_);
    return last_done_ >= ticket;
}

void CommandQueue::wait(Ticket ticket) {
    std::unique_lock lock(mutex_);
    require(ticket <= last_pushed_, "there is no command " + std::to_string(ticket) + " to wait for");
    finished_.wait(lock, [&] { return last_done_ >= ticket; });
    const auto failure = failures_.find(ticket);
    if (failure == failures_.end()) return;
    const std::exception_ptr error = failure->second;
    failures_.erase(failure);
    std::rethrow_exception(error);
}

void CommandQueue::work() {
    std::unique_lock lock(mutex_);
    for (;;) {
        pushed_.wait(lock, [&] { return ending_ || !commands_.empty(); });
        if (commands_.empty()) return;
        const std::function<void()> command = std::move(commands_.front());
        commands_.pop_front();
        lock.unlock();
        std::exception_ptr failure;
        try {
            command();
        } catch (...) {
            failure = std::current_exception();
        }
        lock.lock();
        last_done_++;
        if (failure) failures_[last_done_] = failure;
        finished_.notify_all();
    }
}

}  // namespace tandem
