// Calls for help when something takes too long.
#pragma once
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace tandem {

// Thread-safe. The alarm runs on the watchdog's own thread, at most once per `arm`.
class Watchdog {
  public:
    explicit Watchdog(std::function<void()> alarm);
    ~Watchdog();
    Watchdog(const Watchdog&) = delete;
    Watchdog& operator=(const Watchdog&) = delete;

    // The alarm is called unless `disarm` comes within `limit_s` seconds.
    void arm(double limit_s);
    void disarm();

  private:
    using Clock = std::chrono::steady_clock;

    void watch();

    std::function<void()> alarm_;
    std::mutex mutex_;
    std::condition_variable changed_;
    Clock::time_point deadline_ = Clock::time_point::max();
    bool ending_ = false;
    bool sleeping_ = false;  // until somebody arms; while windows follow each other it only naps
    std::thread thread_;
};

}  // namespace tandem
