// The likeliest token of every row of logits.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace tandem::cuda {

// A row of logits in short. `token`: of the greatest logit, of equal ones the lowest; -1 where a logit is NaN.
struct Likeliest {
    int32_t token;
    float peak;    // the greatest logit
    float lowest;  // the least
};

constexpr int kLikeliestParts = 32;  // of a row of logits, a block each

// What a row's blocks tell each other, on the card; zero before the first launch.
struct LikeliestParts {
    Likeliest parts[kLikeliestParts];
    Likeliest whole;    // of the row, for the kernels behind
    uint32_t num_done;  // 0 between launches
};

struct LikeliestProblem {
    const float* logits;  // [rows, vocab]
    int32_t vocab;
    LikeliestParts* parts;  // [rows]
    Likeliest* out;         // [rows], may lie in mapped host memory
};

void likeliest_window(const LikeliestProblem& problem, int num_rows, bool dependent, cudaStream_t stream);

}  // namespace tandem::cuda
