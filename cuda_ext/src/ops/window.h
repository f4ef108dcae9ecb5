// What changes from run to run of a program: the rows and their place in the conversation.
#pragma once
#include <cstdint>

#include "pool/pool.h"

namespace tandem {

// Rows of one window or chunk: `num_rows` tokens at positions `position`, `position` + 1, ...; the last `num_logits` of
// them go through the head.
struct Window {
    const int32_t* tokens = nullptr;
    int64_t position = 0;
    int num_rows = 0;
    int num_logits = 0;
};

// Which rows of a window an operation works on.
enum class Rows { all, logits };

struct RowSpan {
    int first;
    int count;
};

inline RowSpan span_of(const Window& window, Rows rows) {
    if (rows == Rows::all) return {0, window.num_rows};
    return {window.num_rows - window.num_logits, window.num_logits};
}

}  // namespace tandem
