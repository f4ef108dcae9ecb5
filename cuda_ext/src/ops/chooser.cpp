#include "ops/chooser.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>

#include "base/require.h"
#include "ops/choice.h"
#include "ops/vector.h"

namespace tandem {

namespace {

constexpr int kPart = 1024;  // logits that are looked at together
constexpr int kLanes = 16;

float greatest(std::span<const float> logits) {
    float best[kLanes];
    std::fill(best, best + kLanes, -INFINITY);
    size_t i = 0;
    for (; i + kLanes <= logits.size(); i += kLanes)
        for (int lane = 0; lane < kLanes; lane++) best[lane] = logits[i + lane] > best[lane] ? logits[i + lane] : best[lane];
    float peak = *std::max_element(best, best + kLanes);
    for (; i < logits.size(); i++) peak = std::max(peak, logits[i]);
    return peak;
}

// The tokens in reach, from the likeliest on: by bins, which are put in order only where somebody looks.
class Order {
  public:
    // A place in the order: what is in front of it.
    struct Place {
        int64_t num = 0;
        uint64_t mass = 0;
        int32_t before = -1;  // the token in front, where its bin was looked into
    };

    Order(const ChoiceRule& rule, std::span<const float> logits, float peak, quant::Isa isa, std::vector<uint16_t>& bins)
        : rule_(rule), logits_(logits), peak_(peak), bins_(bins) {
        const VectorKernels& kernels = vector_kernels(isa);
        bins_.assign((logits.size() + kLook - 1) / kLook * kLook, kNoBin);
        alignas(64) float depths[kPart], exponentials[kPart];
        for (size_t first = 0; first < logits.size(); first += kPart) {
            const int num = static_cast<int>(std::min<size_t>(kPart, logits.size() - first));
            for (int i = 0; i < num; i++) depths[i] = depth(logits[first + i]);
            for (int i = 0; i < num; i++) exponentials[i] = -depths[i];
            kernels.exp_below(exponentials, 0.0f, num, exponentials);
            for (int i = 0; i < num; i++)
                if (in_reach(depths[i])) add(first + i, choice_bin(depths[i], kLeastBinsPerUnit), whole_weight(exponentials[i]));
        }
    }

    // The first place where goes_on(place) is false, or the end; it must be true of all places before one that it is true of.
    template <class GoesOn>
    Place first_not(GoesOn goes_on) const {
        Place place;
        for (int bin = 0; bin < kChoiceBins; bin++) {
            const Place next{place.num + whole_[bin].num, place.mass + whole_[bin].mass, -1};
            if (goes_on(next)) {
                place = next;
                continue;
            }
            for (const uint64_t key : keys_of(bin)) {
                if (!goes_on(place)) return place;
                place = {place.num + 1, place.mass + choice_weight(depth(key_logit(key))), key_token(key)};
            }
            return place;
        }
        return place;
    }

    // How many tokens are above the least.
    int64_t num_above_least() const {
        const float logit = least_logit(rule_, peak_), least_depth = depth(logit);
        const int least = in_reach(least_depth) ? choice_bin(least_depth, kLeastBinsPerUnit) : kChoiceBins;
        int64_t num = 0;
        for (int bin = 0; bin < least; bin++) num += whole_[bin].num;
        if (least == kChoiceBins) return num;
        const std::vector<uint64_t> keys = keys_of(least);
        return num + std::count_if(keys.begin(), keys.end(), [&](uint64_t key) { return key_logit(key) >= logit; });
    }

  private:
    static constexpr uint16_t kNoBin = 0xffff;
    static constexpr size_t kLook = 64;  // tokens that are searched at once

    struct Whole {
        int64_t num;
        uint64_t mass;
    };

    float depth(float logit) const { return choice_depth(logit, peak_, rule_.temperature); }

    void add(size_t token, int bin, uint64_t weight) {
        bins_[token] = static_cast<uint16_t>(bin);
        whole_[bin].num++;
        whole_[bin].mass += weight;
    }

    std::vector<uint64_t> keys_of(int bin) const {
        std::vector<uint64_t> keys;
        keys.reserve(whole_[bin].num);
        for (size_t first = 0; first < bins_.size(); first += kLook) {
            uint16_t found = 0;
            for (size_t i = 0; i < kLook; i++) found += bins_[first + i] == bin;
            if (found == 0) continue;
            for (size_t token = first; token < first + kLook; token++)
                if (bins_[token] == bin) keys.push_back(choice_key(logits_[token], static_cast<int32_t>(token)));
        }
        std::sort(keys.begin(), keys.end());
        return keys;
    }

    const ChoiceRule& rule_;
    std::span<const float> logits_;
    float peak_;
    std::vector<uint16_t>& bins_;  // of the tokens
    std::array<Whole, kChoiceBins> whole_{};
};

int32_t drawn(const ChoiceRule& rule, const Order& order) {
    using Place = Order::Place;
    Place end = order.first_not([&](const Place& place) { return rule.top_k == 0 || place.num < rule.top_k; });
    const uint64_t total = end.mass;
    const int64_t most = std::min(end.num, order.num_above_least());
    if (most < end.num || rule.top_p < 1.0)
        end = order.first_not([&](const Place& place) { return place.num < most && within_mass(rule, place.mass, total); });
    const uint64_t drawn = drawn_place(rule, end.mass);
    return order.first_not([&](const Place& place) { return place.mass <= drawn; }).before;
}

}  // namespace

Chooser::Chooser(float temperature, int32_t top_k, double top_p, float min_offset) {
    require(temperature >= 0.0f && std::isfinite(temperature), "a temperature is at least 0");
    require(top_k >= 0, "top_k is at least 0");
    require(top_p >= 0.0 && top_p <= 1.0, "top_p lies between 0 and 1");
    require(min_offset <= 0.0f, "min_offset is at most 0");
    rule_.temperature = temperature;
    rule_.top_k = top_k;
    rule_.top_p = top_p;
    rule_.min_offset = min_offset;
}

void Chooser::change(const LogitChange& change) {
    const auto [place, is_new] = places_.try_emplace(change.token, changes_.size());
    if (is_new) {
        changes_.push_back(change);
        rule_.num_changes = static_cast<int32_t>(changes_.size());
    } else {
        changes_[place->second] = change;
    }
}

void Chooser::set_fraction(uint64_t fraction) {
    require(fraction >> 53 == 0, "a random number has 53 bits");
    rule_.fraction = fraction;
}

int32_t Chooser::choose(std::span<const float> logits, quant::Isa isa) {
    std::vector<float> changed;
    if (!changes_.empty()) {
        changed.assign(logits.begin(), logits.end());
        for (const LogitChange& change : changes_) {
            require(change.token >= 0 && static_cast<size_t>(change.token) < logits.size(),
                    "the row has no token " + std::to_string(change.token));
            changed[change.token] = changed_logit(logits[change.token], change);
        }
        logits = changed;
    }
    const float peak = greatest(logits);
    require(std::isfinite(peak), "there is no greatest logit");
    if (rule_.temperature == 0.0f) return static_cast<int32_t>(std::find(logits.begin(), logits.end(), peak) - logits.begin());
    return drawn(rule_, Order(rule_, logits, peak, isa, bins_));
}

}  // namespace tandem
