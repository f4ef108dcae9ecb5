// Where a routed row is computed: `fetched` by the own card with weights copied from the second one's slots, in prompts.
#pragma once

namespace tandem {

enum class Tier { own, streamed, host, peer, linked, fetched };
constexpr int kNumTiers = 6;

constexpr const char* tier_name(Tier tier) {
    constexpr const char* kNames[kNumTiers] = {"own", "streamed", "host", "peer", "linked", "fetched"};
    return kNames[static_cast<int>(tier)];
}

}  // namespace tandem
