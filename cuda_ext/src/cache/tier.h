// Where a routed row is computed.
#pragma once

namespace tandem {

enum class Tier { own, streamed, host, peer, linked };
constexpr int kNumTiers = 5;

constexpr const char* tier_name(Tier tier) {
    constexpr const char* kNames[kNumTiers] = {"own", "streamed", "host", "peer", "linked"};
    return kNames[static_cast<int>(tier)];
}

}  // namespace tandem
