#include "cards/program.h"

#include <algorithm>

#include "base/require.h"

namespace tandem {

Program::Program(const Limits& limits, View tokens) : limits_(limits), tokens_(std::move(tokens)) {
    require(limits.max_rows >= 1 && limits.max_logits >= 1 && limits.context >= limits.max_rows && limits.vocab >= 1,
            "a program needs at least one row, one row of logits, one token and a context of its rows");
    require(tokens_.nbytes >= limits.max_rows * sizeof(int32_t), "the memory for a window's tokens is too small");
    window_.tokens = tokens_.as<int32_t>();
}

void Program::Limits::check(std::span<const int32_t> tokens, int64_t position, int num_logits) const {
    const int64_t rows = static_cast<int64_t>(tokens.size());
    require(rows >= 1 && rows <= max_rows, std::to_string(rows) + " rows were given; a run has 1 to " + std::to_string(max_rows));
    require(position >= 0 && position + rows <= context, std::to_string(rows) + " rows at position " + std::to_string(position) +
                                                             " do not fit the context of " + std::to_string(context));
    require(num_logits >= 0 && num_logits <= std::min<int64_t>(rows, max_logits),
            "logits of " + std::to_string(num_logits) + " rows were asked for; 0 to " +
                std::to_string(std::min<int64_t>(rows, max_logits)) + " are possible");
    for (const int32_t token : tokens)
        require(token >= 0 && token < vocab,
                "token " + std::to_string(token) + " is not in the vocabulary of " + std::to_string(vocab));
}

void Program::set_window(std::span<const int32_t> tokens, int64_t position, int num_logits) {
    limits_.check(tokens, position, num_logits);
    std::copy(tokens.begin(), tokens.end(), tokens_.as<int32_t>());
    window_.position = position;
    window_.num_rows = static_cast<int>(tokens.size());
    window_.num_logits = num_logits;
}

void Program::run(Pool& pool) {
    bool given_up = false;
    for (const Operation& operation : operations_) {
        operation(pool, window_);
        given_up = interrupted_.load(std::memory_order_relaxed);
        if (given_up) break;
    }
    interrupted_.store(false, std::memory_order_relaxed);
    if (given_up) throw Interrupted();
}

}  // namespace tandem
