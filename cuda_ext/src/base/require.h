// Checks of cold calls: what a caller built wrongly ends in an exception with a sentence, never in a wild pointer.
#pragma once
#include <stdexcept>
#include <string>

namespace tandem {

inline void require(bool holds, const std::string& sentence) {
    if (!holds) throw std::invalid_argument(sentence);
}

}  // namespace tandem
