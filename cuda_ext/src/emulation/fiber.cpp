#include "emulation/fiber.h"

#include <sys/mman.h>

#include <new>

namespace tandem::emulation {

#if defined(__x86_64__)

// The registers that a called function must keep (System V ABI) lie on the stack of whoever is not running.
extern "C" void tandem_switch_stacks(void** from, void* to);
asm(R"(
    .text
    .p2align 4
    .hidden tandem_switch_stacks
    .globl tandem_switch_stacks
    .type tandem_switch_stacks, @function
tandem_switch_stacks:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size tandem_switch_stacks, . - tandem_switch_stacks
)");

void prepare(Context& context, uint8_t* stack, size_t nbytes, void (*entry)()) {
    constexpr int kSaved = 6;
    auto* top = reinterpret_cast<void**>(stack + nbytes - 16);  // the entry's address at a multiple of 16, as after a call
    top[1] = nullptr;
    top[0] = reinterpret_cast<void*>(entry);
    for (int i = 1; i <= kSaved; i++) top[-i] = nullptr;
    context.stack_pointer = top - kSaved;
}

void switch_context(Context& from, const Context& to) {
    tandem_switch_stacks(&from.stack_pointer, to.stack_pointer);
}

#else

void prepare(Context& context, uint8_t* stack, size_t nbytes, void (*entry)()) {
    getcontext(&context.machine);
    context.machine.uc_stack.ss_sp = stack;
    context.machine.uc_stack.ss_size = nbytes;
    context.machine.uc_link = nullptr;
    makecontext(&context.machine, entry, 0);
}

void switch_context(Context& from, const Context& to) {
    swapcontext(&from.machine, &to.machine);
}

#endif

namespace {

constexpr size_t kGuard = 4096;

}  // namespace

Stacks::~Stacks() {
    for (uint8_t* stack : stacks_) munmap(stack - kGuard, kBytes + kGuard);
}

uint8_t* Stacks::stack(size_t i) {
    while (stacks_.size() <= i) {
        void* memory = mmap(nullptr, kBytes + kGuard, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED || mprotect(memory, kGuard, PROT_NONE) != 0) throw std::bad_alloc();
        stacks_.push_back(static_cast<uint8_t*>(memory) + kGuard);
    }
    return stacks_[i];
}

}  // namespace tandem::emulation
