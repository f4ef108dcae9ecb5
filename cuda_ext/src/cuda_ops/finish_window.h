// The last kernel of a window: the word to the host that it is through.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda_ops/experts_window.h"
#include "cuda_ops/miss_post.h"

namespace tandem::cuda {

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
