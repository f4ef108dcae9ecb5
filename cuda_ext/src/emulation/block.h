// One block of a grid: its threads are fibers that run until they must wait for each other.
//
//   ready     could run
//   meeting   waits in an operation of its warp until all 32 lanes have come
//   barrier   waits in __syncthreads until all threads that have not returned have come
//   spinning  called spin_pause(): runs again when nobody else can
//   done      has returned from the kernel
//
// A running thread goes on until it waits; then the lane next to it runs. Blocks with an odd number take lanes and warps in
// descending order, so that a missing barrier shows in one of them at least.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <source_location>
#include <stdexcept>
#include <string>
#include <vector>

#include "emulation/fiber.h"
#include "emulation/vectors.h"

namespace tandem::emulation {

using Place = std::source_location;

constexpr int kLanes = 32;
constexpr uint32_t kAllLanes = ~0u;

// A kernel did what would hang or be undefined on a card. The message says which thread waits where.
class LaunchFailure : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

struct GridShape {
    dim3 grid;
    dim3 block;
    size_t shared_bytes = 0;
    bool dependent = false;
    std::string name;
};

// Work of one warp operation, done by the last lane that arrives. `lanes[i]` is what lane i handed in.
using Completion = void (*)(void* const (&lanes)[kLanes]);

class Block;
struct Warp;

// A 16-byte copy that becomes visible when it is waited for.
struct OpenCopy {
    void* to;
    const void* from;
    uint64_t group;
};

// Part of a staged copy that nobody has waited for yet.
struct StagedBytes {
    const void* owner;
    void* to;
    const void* from;
    uint32_t nbytes;
};

struct Thread {
    Context context;
    uint3 index;
    int lane = 0;
    Block* block = nullptr;
    Warp* warp = nullptr;
    bool waited = false;  // wait_prerequisites() was called
    const char* operation = nullptr;
    Place place;
    void* deposit = nullptr;
    std::vector<OpenCopy> copies;
    uint64_t group = 0;  // of copies not committed yet
};

// Each mask has a bit per lane; a running lane is in none.
struct Warp {
    Thread* threads = nullptr;
    uint32_t ready = 0, meeting = 0, barrier = 0, spinning = 0, done = 0;
};

// Confined to the system thread that runs it.
class Block {
  public:
    Block(const GridShape& shape, const std::function<void()>& kernel);

    // Runs one block to its end. Throws LaunchFailure; the threads' stacks are then abandoned.
    void run(uint3 index, uint64_t number);

    // ---- for the running thread ----
    void meet(const char* operation, void* deposit, Completion complete, const Place& place);
    void barrier(const Place& place);
    void spin(const Place& place);
    [[noreturn]] void fail(const std::string& what);

    uint8_t* shared() const { return shared_; }
    uint64_t serial() const { return serial_; }
    std::vector<StagedBytes> staged;
    bool waited = false;

  private:
    static void enter();
    void start();
    void check_end() const;
    void finish();
    void release_barrier();
    Thread* pick();
    Thread* take(Warp& warp);
    bool wake_spinning();
    void switch_away();
    void leave_with(const std::string& failure);
    void check_meeting(const Warp& warp);
    std::string thread_name(const Thread& thread) const;
    std::string waiting_threads() const;

    const GridShape& shape_;
    const std::function<void()>& kernel_;
    uint3 index_ = {};
    bool descending_ = false;
    uint64_t serial_ = 0;
    uint8_t* shared_ = nullptr;
    std::vector<Thread> threads_;
    std::vector<Warp> warps_;
    size_t cursor_ = 0;  // the warp that ran last
    unsigned num_live_ = 0, num_at_barrier_ = 0;
    uint64_t idle_rounds_ = 0;
    double idle_since_s_ = 0;
    Context outside_;
    std::string failure_;
};

// The thread that runs now on this system thread; null outside kernels.
extern constinit thread_local Thread* current;

// Runs all blocks, one after the other in the order of their numbers. Throws LaunchFailure.
void run_grid(const GridShape& shape, const std::function<void()>& kernel);

}  // namespace tandem::emulation

// Of the thread that runs now on this system thread.
extern constinit thread_local uint3 threadIdx;
extern constinit thread_local uint3 blockIdx;
extern constinit thread_local dim3 blockDim;
extern constinit thread_local dim3 gridDim;
