// How the next token is to be chosen: what ops/choice.h is told.
#pragma once
#include <cmath>
#include <cstdint>

namespace tandem {

struct ChoiceRule {
    float temperature = 0.0f;      // 0: the greatest logit is taken
    int32_t top_k = 0;             // 0: off
    double top_p = 1.0;            // 1: off
    float min_offset = -INFINITY;  // logits stay that are not below the greatest plus this; -infinity: off
    int32_t num_changes = 0;       // of logits, before anything else
    uint64_t fraction = 0;         // the random number, in units of 2^-53: below 2^53
};

// What becomes of one token's logit: + bias, then divided by `repetition` (multiplied where it is negative), then - penalty.
struct LogitChange {
    int32_t token;
    float bias;
    float repetition;
    float penalty;
};

}  // namespace tandem
