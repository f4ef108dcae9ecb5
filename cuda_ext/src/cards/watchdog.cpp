#include "cards/watchdog.h"

namespace tandem {

namespace {

constexpr std::chrono::milliseconds kNap(200);  // arming, which happens in every window, need not wake a thread that naps

}  // namespace

Watchdog::Watchdog(std::function<void()> alarm) : alarm_(std::move(alarm)), thread_([this] { watch(); }) {}

Watchdog::~Watchdog() {
    {
        std::lock_guard lock(mutex_);
        ending_ = true;
    }
    changed_.notify_one();
    thread_.join();
}

void Watchdog::arm(double limit_s) {
    std::lock_guard lock(mutex_);
    if (sleeping_) changed_.notify_one();
    deadline_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(limit_s));
}

void Watchdog::disarm() {
    std::lock_guard lock(mutex_);
    deadline_ = Clock::time_point::max();
}

void Watchdog::watch() {
    std::unique_lock lock(mutex_);
    while (!ending_) {
        if (Clock::now() < deadline_) {
            const bool was_idle = deadline_ == Clock::time_point::max();
            changed_.wait_for(lock, kNap);
            if (!was_idle || deadline_ != Clock::time_point::max()) continue;
            sleeping_ = true;
            changed_.wait(lock, [&] { return ending_ || deadline_ != Clock::time_point::max(); });
            sleeping_ = false;
        } else {
            deadline_ = Clock::time_point::max();
            lock.unlock();
            alarm_();
            lock.lock();
        }
    }
}

}  // namespace tandem
