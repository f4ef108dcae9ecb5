// Where a routed row is computed.
#pragma once

namespace tandem {

enum class Tier { own, streamed, host };
constexpr int kNumTiers = 3;

}  // namespace tandem
