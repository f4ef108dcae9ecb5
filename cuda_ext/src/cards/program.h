// A model's forward pass, recorded once: the host twin of a captured graph.
#pragma once
#include <atomic>
#include <functional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "ops/window.h"

namespace tandem {

// The run was given up between two operations; state before its position is unchanged, and it may be run again.
struct Interrupted : std::runtime_error {
    Interrupted() : std::runtime_error("the run was interrupted") {}
};

// Thread rule: recorded by one thread, then run by the card's command thread; `interrupt` by any.
class Program {
  public:
    using Operation = std::function<void(Pool&, const Window&)>;

    struct Limits {
        int max_rows;
        int max_logits;
        int64_t context;
        int vocab;

        // Throws std::invalid_argument for rows, positions or tokens beyond the limits.
        void check(std::span<const int32_t> tokens, int64_t position, int num_logits) const;
    };

    // `tokens`: memory for max_rows int32.
    Program(const Limits& limits, View tokens);

    const Limits& limits() const { return limits_; }
    int num_operations() const { return static_cast<int>(operations_.size()); }

    void add(Operation operation) { operations_.push_back(std::move(operation)); }
    // Keeps memory alive that recorded operations point into.
    void keep(const View& view) { kept_.push_back(view.buffer); }

    // What the next run works on. Throws as Limits::check.
    void set_window(std::span<const int32_t> tokens, int64_t position, int num_logits);

    // Throws Interrupted, also when linked rows did not come.
    void run(Pool& pool);

    // The run in progress, or else the next one, ends as soon as its current operation is through.
    void interrupt() { interrupted_.store(true, std::memory_order_relaxed); }

  private:
    Limits limits_;
    View tokens_;
    Window window_;
    std::vector<Operation> operations_;
    std::vector<std::shared_ptr<Buffer>> kept_;
    std::atomic<bool> interrupted_{false};
};

}  // namespace tandem
