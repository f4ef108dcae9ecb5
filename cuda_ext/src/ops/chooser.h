// Draws the next token on the host.
#pragma once
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "ops/choice_rule.h"
#include "quant/row.h"

namespace tandem {

// How an answer's tokens are chosen. Confined to one thread.
class Chooser {
  public:
    // Throws std::invalid_argument where one is out of range: temperature >= 0, top_k >= 0, 0 <= top_p <= 1, min_offset <= 0.
    Chooser(float temperature, int32_t top_k, double top_p, float min_offset);

    // Takes the place of an earlier one of the same token.
    void change(const LogitChange& change);
    // The random number of the next token, below 2^53.
    void set_fraction(uint64_t fraction);

    const ChoiceRule& rule() const { return rule_; }
    std::span<const LogitChange> changes() const { return changes_; }

    // The token that is drawn from finite logits, without those of a NaN. Throws std::invalid_argument where there is none, or a
    // change is of a token that the row does not have.
    int32_t choose(std::span<const float> logits, quant::Isa isa);

  private:
    ChoiceRule rule_;
    std::vector<LogitChange> changes_;
    std::unordered_map<int32_t, size_t> places_;  // by token
    std::vector<uint16_t> bins_;                  // scratch: memory of this size is dear to get
};

}  // namespace tandem
