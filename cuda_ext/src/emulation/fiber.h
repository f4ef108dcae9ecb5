// Fibers: many threads of control on one thread of the system, switched by hand.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace tandem::emulation {

// Where a fiber goes on. Confined to the system thread that made it.
struct Context {
#if defined(__x86_64__)
    void* stack_pointer = nullptr;
#else
    ucontext_t machine;
#endif
};

// Makes `context` start `entry` on the given stack; `entry` must never return.
void prepare(Context& context, uint8_t* stack, size_t nbytes, void (*entry)());

// Goes on at `to`; returns when somebody switches to `from`.
void switch_context(Context& from, const Context& to);

// Stacks, each with an inaccessible page below it. They are mapped when first asked for and kept.
class Stacks {
  public:
    static constexpr size_t kBytes = 128 * 1024;

    Stacks() = default;
    Stacks(const Stacks&) = delete;
    Stacks& operator=(const Stacks&) = delete;
    ~Stacks();

    uint8_t* stack(size_t i);  // kBytes, growing down from its end

  private:
    std::vector<uint8_t*> stacks_;
};

}  // namespace tandem::emulation
