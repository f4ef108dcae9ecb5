// What changes from window to window, in the card's own memory, so that a captured launch can be replayed at any position.
//
// Written before the window's first kernel starts. Kernels read it before wait_prerequisites().
#pragma once
#include <cstdint>

#include "ops/choice_rule.h"

namespace tandem::cuda {

constexpr int kMaxWindowRows = 8;

// Shares of a window's absent experts that cards read from the arena, together at most 1.
struct StreamedRatios {
    float own;   // by this card
    float peer;  // by the second one
};

struct WindowState {
    int32_t num_rows;    // 1..kMaxWindowRows; a launch is made for one number of rows and trusts its own
    int32_t num_logits;  // the last rows of the window that go through the head
    int64_t position;    // of the first row; row t lies at position + t
    StreamedRatios streamed;
    int32_t tokens[kMaxWindowRows];
    ChoiceRule choice;  // of the next token, where one is chosen
};

}  // namespace tandem::cuda
