// How the next token is drawn from a row of logits: in whole numbers, so that a card and the host draw the same one.
// docs/arithmetic.md says it in words.
#pragma once
#include <cstdint>

#include "base/host_device.h"
#include "ops/choice_rule.h"
#include "quant/arithmetic.h"

namespace tandem {

constexpr float kMostLogit = 3e38f;    // what changes may make of one, finite
constexpr float kChoiceReach = 28.0f;  // tokens deeper than this have a weight of zero
constexpr int kChoiceBins = 896;
constexpr float kLeastBinsPerUnit = kChoiceBins / kChoiceReach;
constexpr float kMostBinsPerUnit = 1e30f;
constexpr float kChoiceOne = 0x1p40f;  // weight of the likeliest token

TANDEM_HD float changed_logit(float logit, const LogitChange& change) {
    const float biased = quant::add(logit, change.bias);
    const float repeated = biased < 0.0f ? quant::mul(biased, change.repetition) : quant::div(biased, change.repetition);
    const float penalised = quant::add(repeated, -change.penalty);
    const float below = penalised < kMostLogit ? penalised : kMostLogit;  // a NaN too, of a repetition of almost 0
    return below > -kMostLogit ? below : -kMostLogit;
}

// How far a logit lies below the greatest, in units of the temperature.
TANDEM_HD float choice_depth(float logit, float peak, float temperature) {
    return quant::div(quant::add(peak, -logit), temperature);
}
TANDEM_HD bool in_reach(float depth) {  // not for NaN
    return depth <= kChoiceReach;
}
// Tokens are found by bins of their depth: in which is no matter, but it is never lower for a greater depth in reach.
TANDEM_HD int choice_bin(float depth, float bins_per_unit) {
    const float bin = quant::mul(depth, bins_per_unit);
    return bin < kChoiceBins ? static_cast<int>(bin) : kChoiceBins - 1;
}
TANDEM_HD uint64_t whole_weight(float exponential) {
    return static_cast<uint64_t>(static_cast<int64_t>(quant::mul(exponential, kChoiceOne)));
}
TANDEM_HD uint64_t choice_weight(float depth) {
    return whole_weight(quant::exp_clamped(-depth));
}

// Rising keys are tokens from the likeliest on, equally likely ones by their ids.
TANDEM_HD uint64_t choice_key(float logit, int32_t token) {
    const uint32_t bits = quant::float_bits(quant::add(logit, 0.0f));  // one zero
    const uint32_t rising = (bits & 0x80000000u) ? ~bits : bits | 0x80000000u;
    return static_cast<uint64_t>(~rising) << 32 | static_cast<uint32_t>(token);
}
TANDEM_HD int32_t key_token(uint64_t key) {
    return static_cast<int32_t>(static_cast<uint32_t>(key));
}
TANDEM_HD float key_logit(uint64_t key) {
    const uint32_t rising = ~static_cast<uint32_t>(key >> 32);
    return quant::bits_float((rising & 0x80000000u) ? rising & 0x7fffffffu : ~rising);
}

// Whether a token stays that has `before` in front of it, of `total`, by top_p.
TANDEM_HD bool within_mass(const ChoiceRule& rule, uint64_t before, uint64_t total) {
    return rule.top_p == 1.0 || before == 0 || static_cast<double>(before) < rule.top_p * static_cast<double>(total);
}
// Logits below it do not stay, by min_p.
TANDEM_HD float least_logit(const ChoiceRule& rule, float peak) {
    return quant::add(peak, rule.min_offset);
}
// The place in a mass of `total` that is drawn: the token with this much in front of it, or less.
TANDEM_HD uint64_t drawn_place(const ChoiceRule& rule, uint64_t total) {
#ifdef __CUDA_ARCH__
    return __umul64hi(rule.fraction << 11, total);
#else
    return static_cast<uint64_t>(static_cast<unsigned __int128>(rule.fraction << 11) * total >> 64);
#endif
}

}  // namespace tandem
