#include "emulation/block.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <map>

constinit thread_local uint3 threadIdx = {};
constinit thread_local uint3 blockIdx = {};
constinit thread_local dim3 blockDim;
constinit thread_local dim3 gridDim;

namespace tandem::emulation {

constinit thread_local Thread* current = nullptr;

namespace {

constexpr double kSpinLimit_s = 60;
constexpr uint64_t kYieldRounds = 200;  // idle rounds that only yield; later ones sleep
constexpr unsigned kSleep_us = 20;
constexpr size_t kMaxShared = 232448;  // 227 KiB
constexpr size_t kGuard = 1024;
constexpr uint8_t kGuardByte = 0xa5;
constexpr uint8_t kUndefined = 0xff;  // NaN as a float

// What one system thread keeps between blocks.
struct Workplace {
    Stacks stacks;
    std::vector<uint8_t> shared = std::vector<uint8_t>(kMaxShared + 2 * kGuard);
};

Workplace& workplace() {
    static thread_local Workplace place;
    return place;
}

double now_s() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::string triple(const uint3& v) {
    return "(" + std::to_string(v.x) + ", " + std::to_string(v.y) + ", " + std::to_string(v.z) + ")";
}

std::string describe(const Place& place) {
    const char* name = std::strrchr(place.file_name(), '/');
    return std::string(name ? name + 1 : place.file_name()) + ":" + std::to_string(place.line()) + " in " + place.function_name();
}

}  // namespace

Block::Block(const GridShape& shape, const std::function<void()>& kernel) : shape_(shape), kernel_(kernel) {
    const unsigned num = shape.block.x * shape.block.y * shape.block.z;
    threads_.resize(num);
    warps_.resize(num / kLanes);
    for (unsigned i = 0; i < num; i++) {
        Thread& thread = threads_[i];
        thread.index = {i % shape.block.x, i / shape.block.x % shape.block.y, i / (shape.block.x * shape.block.y)};
        thread.lane = static_cast<int>(i % kLanes);
        thread.block = this;
        thread.warp = &warps_[i / kLanes];
    }
    for (size_t w = 0; w < warps_.size(); w++) warps_[w].threads = &threads_[w * kLanes];
    uint8_t* memory = workplace().shared.data();
    shared_ = memory + (kGuard - reinterpret_cast<uintptr_t>(memory) % kGuard);
}

void Block::run(uint3 index, uint64_t number) {
    static thread_local uint64_t serials = 0;
    index_ = index;
    blockIdx = index;
    blockDim = shape_.block;
    gridDim = shape_.grid;
    descending_ = number % 2 != 0;
    serial_ = ++serials;
    start();
    switch_away();
    current = nullptr;
    if (!failure_.empty()) throw LaunchFailure(failure_);
    check_end();
}

void Block::start() {
    std::memset(shared_, kUndefined, shape_.shared_bytes);
    std::memset(shared_ + shape_.shared_bytes, kGuardByte, kGuard);
    num_live_ = static_cast<unsigned>(threads_.size());
    num_at_barrier_ = 0;
    staged.clear();
    waited = false;
    idle_rounds_ = 0;
    cursor_ = descending_ ? warps_.size() - 1 : 0;
    for (size_t i = 0; i < threads_.size(); i++) {
        threads_[i].waited = false;
        threads_[i].operation = nullptr;
        threads_[i].copies.clear();
        threads_[i].group = 0;
        prepare(threads_[i].context, workplace().stacks.stack(i), Stacks::kBytes, &Block::enter);
    }
    for (Warp& warp : warps_) warp = {warp.threads, kAllLanes, 0, 0, 0, 0};
}

void Block::check_end() const {
    const Place& place = threads_[0].place;
    const std::string seen = threads_[0].operation == nullptr ? "" : " (thread 0 last waited at " + describe(place) + ")";
    const std::string name = shape_.name + ", block " + triple(index_) + seen + ": ";
    for (size_t i = 0; i < kGuard; i++)
        if (shared_[shape_.shared_bytes + i] != kGuardByte)
            throw LaunchFailure(name + "byte " + std::to_string(shape_.shared_bytes + i) +
                                " of dynamic shared memory was written; it has " + std::to_string(shape_.shared_bytes));
    if (!staged.empty()) throw LaunchFailure(name + "a staged copy was started and never waited for");
    if (shape_.dependent && !waited) throw LaunchFailure(name + "launched as dependent, but wait_prerequisites() was never called");
}

void Block::enter() {
    Block& block = *current->block;
    block.kernel_();
    block.finish();
}

void Block::finish() {
    Warp& warp = *current->warp;
    warp.done |= 1u << current->lane;
    if (warp.meeting != 0) fail("returned while other lanes of its warp wait for it:" + waiting_threads());
    num_live_--;
    release_barrier();
    switch_away();
}

void Block::release_barrier() {
    if (num_at_barrier_ == 0 || num_at_barrier_ != num_live_) return;
    num_at_barrier_ = 0;
    for (Warp& warp : warps_) {
        warp.ready |= warp.barrier;
        warp.barrier = 0;
    }
}

void Block::meet(const char* operation, void* deposit, Completion complete, const Place& place) {
    Thread& self = *current;
    Warp& warp = *self.warp;
    self.operation = operation;
    self.place = place;
    self.deposit = deposit;
    if (warp.done != 0)
        fail(std::string("calls ") + operation + " at " + describe(place) + ", but lanes of its warp have returned");
    warp.meeting |= 1u << self.lane;
    if (warp.meeting != kAllLanes) return switch_away();
    check_meeting(warp);
    void* deposits[kLanes];
    for (int i = 0; i < kLanes; i++) deposits[i] = warp.threads[i].deposit;
    if (complete) complete(deposits);
    warp.ready |= warp.meeting & ~(1u << self.lane);
    warp.meeting = 0;
}

void Block::check_meeting(const Warp& warp) {
    for (int i = 1; i < kLanes; i++) {
        const Thread &a = warp.threads[0], &b = warp.threads[i];
        const bool same = a.operation == b.operation || std::strcmp(a.operation, b.operation) == 0;
        if (same && (a.place.line() == b.place.line() || std::strcmp(a.operation, "__syncwarp") == 0)) continue;
        fail("the lanes of its warp meet in different operations:" + waiting_threads());
    }
}

void Block::barrier(const Place& place) {
    Thread& self = *current;
    self.operation = "__syncthreads";
    self.place = place;
    self.warp->barrier |= 1u << self.lane;
    num_at_barrier_++;
    release_barrier();
    switch_away();
}

void Block::spin(const Place& place) {
    current->operation = "spin_pause";
    current->place = place;
    current->warp->spinning |= 1u << current->lane;
    switch_away();
}

Thread* Block::take(Warp& warp) {
    const int lane = descending_ ? kLanes - 1 - std::countl_zero(warp.ready) : std::countr_zero(warp.ready);
    warp.ready &= ~(1u << lane);
    return &warp.threads[lane];
}

Thread* Block::pick() {
    do {
        for (size_t i = 0; i < warps_.size(); i++) {
            if (warps_[cursor_].ready != 0) return take(warps_[cursor_]);
            cursor_ = descending_ ? (cursor_ + warps_.size() - 1) % warps_.size() : (cursor_ + 1) % warps_.size();
        }
    } while (wake_spinning());
    return nullptr;
}

// Everybody who can run only waits for memory: lets other threads of the system run. Returns false if there is nobody.
bool Block::wake_spinning() {
    bool any = false;
    for (Warp& warp : warps_) {
        any |= warp.spinning != 0;
        warp.ready |= warp.spinning;
        warp.spinning = 0;
    }
    if (!any) return false;
    if (idle_rounds_++ == 0) idle_since_s_ = now_s();
    if (idle_rounds_ < kYieldRounds)
        sched_yield();
    else
        usleep(kSleep_us);
    if (idle_rounds_ % kYieldRounds == 0 && now_s() - idle_since_s_ > kSpinLimit_s) {
        for (Warp& warp : warps_) std::swap(warp.ready, warp.spinning);
        leave_with("waits for memory since " + std::to_string(static_cast<int>(kSpinLimit_s)) + " s:" + waiting_threads());
        return false;
    }
    return true;
}

void Block::switch_away() {
    Thread* const self = current;
    Thread* next = num_live_ == 0 || !failure_.empty() ? nullptr : pick();
    if (next == nullptr && num_live_ != 0 && failure_.empty()) leave_with("no thread can go on:" + waiting_threads());
    if (next == self && self != nullptr) return;
    Context& from = self == nullptr ? outside_ : self->context;
    current = next;
    if (next != nullptr) threadIdx = next->index;
    switch_context(from, next == nullptr ? outside_ : next->context);
}

void Block::leave_with(const std::string& failure) {
    failure_ = shape_.name + ", block " + triple(index_) + ": " + failure;
}

void Block::fail(const std::string& what) {
    leave_with("thread " + triple(current->index) + " " + what);
    switch_away();
    std::abort();  // nobody comes back here
}

std::string Block::thread_name(const Thread& thread) const {
    return std::to_string(&thread - threads_.data());
}

// "threads 0-15, 20 in __shfl_sync at file:line", for every place where somebody waits.
std::string Block::waiting_threads() const {
    std::map<std::string, std::vector<size_t>> places;
    for (size_t i = 0; i < threads_.size(); i++) {
        const Warp& warp = warps_[i / kLanes];
        if (((warp.meeting | warp.barrier | warp.spinning) >> (i % kLanes) & 1) == 0) continue;
        places[std::string(threads_[i].operation) + " at " + describe(threads_[i].place)].push_back(i);
    }
    std::string text;
    for (const auto& [place, threads] : places) {
        text += text.empty() ? " threads" : "; threads";
        for (size_t i = 0; i < threads.size(); i++) {
            size_t last = i;
            while (last + 1 < threads.size() && threads[last + 1] == threads[last] + 1) last++;
            text += (i == 0 ? " " : ", ") + thread_name(threads_[threads[i]]);
            if (last > i) text += "-" + thread_name(threads_[threads[last]]);
            i = last;
        }
        text += " in " + place;
    }
    return text;
}

void run_grid(const GridShape& shape, const std::function<void()>& kernel) {
    Block block(shape, kernel);
    const dim3& grid = shape.grid;
    uint64_t number = 0;
    for (unsigned z = 0; z < grid.z; z++)
        for (unsigned y = 0; y < grid.y; y++)
            for (unsigned x = 0; x < grid.x; x++) block.run({x, y, z}, number++);
}

}  // namespace tandem::emulation
