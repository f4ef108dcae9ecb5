// Chooses the token that follows a window, on the card: the rule of ops/choice.h.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda_ops/likeliest.h"
#include "cuda_ops/window_state.h"
#include "ops/choice.h"

namespace tandem::cuda {

constexpr int kMaxCandidates = 4096;  // tokens that are put in order to choose among them
constexpr int32_t kNotChosen = -1;    // there were more

// What the blocks and kernels of a choice tell each other, on the card; zero before the first launch.
struct ChoiceScratch {
    LikeliestParts changed;  // of the changed logits
    uint64_t mass[kChoiceBins];
    uint32_t count[kChoiceBins];
    uint64_t keys[kMaxCandidates];
    uint32_t num_keys;
    uint32_t num_done;  // 0 between launches
};

struct ChooseProblem {
    const WindowState* state;
    const float* logits;          // [vocab]
    const LikeliestParts* parts;  // of `logits`, by likeliest_window
    int32_t vocab;
    const LogitChange* changes;  // [state->choice.num_changes] in mapped host memory, a token at most once
    float* changed;              // [vocab] on the card
    ChoiceScratch* scratch;
    int32_t* token;  // the chosen token, or kNotChosen; may lie in mapped host memory
};

// Behind likeliest_window.
void choose_window(const ChooseProblem& problem, bool dependent, cudaStream_t stream);

}  // namespace tandem::cuda
