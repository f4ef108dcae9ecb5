#include "emulation/stream.h"

#include <unistd.h>

#include <chrono>
#include <set>
#include <thread>

#include "emulation/memory.h"

namespace tandem::emulation {

void Health::fail(const std::string& message) {
    std::lock_guard lock(mutex_);
    if (message_) return;
    message_ = message;
    std::fprintf(stderr, "emulated card: %s\n", message.c_str());
}

void Health::reset() {
    std::lock_guard lock(mutex_);
    message_.reset();
}

bool Health::failed() const {
    std::lock_guard lock(mutex_);
    return message_.has_value();
}

std::string Health::message() const {
    std::lock_guard lock(mutex_);
    return message_.value_or("");
}

Health& health() {
    static Health health;
    return health;
}

void poll_until(const std::function<bool()>& done) {
    constexpr int kYields = 200;
    constexpr unsigned kSleep_us = 20;
    for (int i = 0; !done(); i++) {
        if (i < kYields)
            std::this_thread::yield();
        else
            usleep(kSleep_us);
    }
}

namespace {

struct Streams {
    std::mutex mutex;
    std::map<cudaStream_t, std::shared_ptr<CUstream_st>> by_handle;
    std::shared_ptr<CUstream_st> default_stream = std::make_shared<CUstream_st>();
};

Streams& streams() {
    static auto* streams = new Streams;  // never destroyed: threads of streams may outlive main()
    return *streams;
}

double now_s() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

}  // namespace tandem::emulation

using namespace tandem::emulation;

std::shared_ptr<CUstream_st> CUstream_st::of(cudaStream_t handle) {
    constexpr uintptr_t kLastSpecial = 2;  // cudaStreamLegacy is 1, cudaStreamPerThread 2
    if (reinterpret_cast<uintptr_t>(handle) <= kLastSpecial) return streams().default_stream;
    std::lock_guard lock(streams().mutex);
    const auto found = streams().by_handle.find(handle);
    return found == streams().by_handle.end() ? nullptr : found->second;
}

cudaStream_t CUstream_st::create() {
    auto stream = std::make_shared<CUstream_st>();
    stream->device = device_in_use();
    std::lock_guard lock(streams().mutex);
    streams().by_handle[stream.get()] = stream;
    return stream.get();
}

bool CUstream_st::destroy(cudaStream_t handle) {
    const std::shared_ptr<CUstream_st> stream = of(handle);
    if (stream == nullptr || stream == streams().default_stream) return false;
    {
        std::lock_guard lock(streams().mutex);
        streams().by_handle.erase(handle);
    }
    std::lock_guard lock(stream->mutex_);
    stream->closed_ = true;  // its thread ends after the last job
    stream->changed_.notify_all();
    return true;
}

std::vector<std::shared_ptr<CUstream_st>> CUstream_st::all() {
    std::lock_guard lock(streams().mutex);
    std::vector<std::shared_ptr<CUstream_st>> found = {streams().default_stream};
    for (const auto& [handle, stream] : streams().by_handle) found.push_back(stream);
    return found;
}

void CUstream_st::enqueue(Job job) {
    if (capture) {
        capture->jobs.push_back(std::move(job));
        clock[this] = ++capture->issued[this];
        return;
    }
    std::lock_guard lock(mutex_);
    start_thread();
    jobs_.push_back(std::move(job));
    changed_.notify_all();
}

void CUstream_st::start_thread() {
    if (started_) return;
    started_ = true;
    std::thread([self = shared_from_this()] { self->work(); }).detach();
}

void CUstream_st::work() {
    std::unique_lock lock(mutex_);
    while (true) {
        changed_.wait(lock, [this] { return closed_ || !jobs_.empty(); });
        if (jobs_.empty()) return;
        const Job job = std::move(jobs_.front());
        jobs_.pop_front();
        busy_ = true;
        lock.unlock();
        poll_until([] { return !health().hangs(); });
        job();
        lock.lock();
        busy_ = false;
        changed_.notify_all();
    }
}

void CUstream_st::wait_idle() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !busy_ && jobs_.empty(); });
}

bool CUstream_st::idle() {
    std::lock_guard lock(mutex_);
    return !busy_ && jobs_.empty();
}

void CUevent_st::State::pass(uint64_t number) {
    std::lock_guard lock(mutex);
    num_passed = std::max(num_passed, number);
    passed_s = now_s();
    changed.notify_all();
}

void CUevent_st::State::wait(uint64_t number) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return num_passed >= number; });
}

bool CUevent_st::State::passed() {
    std::lock_guard lock(mutex);
    return num_passed >= num_recorded;
}
