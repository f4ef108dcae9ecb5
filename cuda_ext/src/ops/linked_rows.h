// Rows of a window that another engine computes.
#pragma once

namespace tandem {

struct ExpertsProblem;

// Implemented by the link. `ask` and `collect` alternate, both on the thread that runs the program.
class LinkedRows {
  public:
    virtual ~LinkedRows() = default;

    // Hands the pairs of the routed list's linked experts over; the problem's input is complete.
    virtual void ask(const ExpertsProblem& problem) = 0;
    // Waits for their rows and puts them into the problem's expert_rows. When the partner is gone instead, `lost` becomes true
    // and the run's result is void.
    virtual void collect(const ExpertsProblem& problem) = 0;
    virtual bool lost() const = 0;

    // No rows are computed from this engine's slots between the two calls, so the residency table may change.
    virtual void hold() = 0;
    virtual void release() = 0;
};

}  // namespace tandem
