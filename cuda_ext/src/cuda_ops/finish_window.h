// The last kernels of a window: the likeliest token of every row of logits, and the word to the host that the window is through.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda_ops/experts_window.h"
#include "cuda_ops/miss_post.h"

namespace tandem::cuda {

// One row of logits in short. `token`: of the greatest logit, of equal ones the lowest; -1 where a logit is NaN.
struct Likeliest {
    int32_t token;
    float peak;    // the greatest logit
    float lowest;  // the least
};

constexpr int kLikeliestParts = 32;  // of a row of logits, a block each

// What a row's blocks tell each other, on the card; zero before the first launch.
struct LikeliestParts {
    Likeliest parts[kLikeliestParts];
    uint32_t num_done;  // 0 between launches
};

struct LikeliestProblem {
    const float* logits;  // [rows, vocab]
    int32_t vocab;
    LikeliestParts* parts;  // [rows]
    Likeliest* out;         // [rows], may lie in mapped host memory
};

void likeliest_window(const LikeliestProblem& problem, int num_rows, bool dependent, cudaStream_t stream);

// What a window came to, in mapped host memory.
struct WindowEnd {
    uint32_t voided;  // a wait was aborted: the window's result is void
};

struct FinishProblem {
    MissState* misses;
    WindowWords* words;  // mapped
    WindowEnd* end;      // mapped
    uint32_t* uses;      // [num_uses] counters on the card, cleared here
    uint32_t* landed;    // [num_uses] where they go in mapped memory
    int32_t num_uses;
    uint32_t* counter;  // one word on the card, 0 between launches
};

// Runs behind everything else of the window: hands the counters over, reports and clears `misses->voided`, and at last raises
// `words->ended`.
void finish_window(const FinishProblem& problem, bool dependent, cudaStream_t stream);

}  // namespace tandem::cuda
