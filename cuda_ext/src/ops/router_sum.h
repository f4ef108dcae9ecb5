// What a router's products are added in: 64-bit fixed point, so that blocks of a card may add theirs in any order.
//
// y[i] = x[i] * gamma[i]; the norm's factor comes later. Of each group of kRouterGroup neighbouring values (the last may be
// shorter): d = 0, then d = fmaf(w[i], y[i], d) for rising i; d is cut to [-kRouterBound, kRouterBound] (NaN: kRouterBound) and
// rounded to a multiple of 1 / kRouterScale. A sum is that of all groups, exact.
#pragma once
#include <cmath>
#include <cstdint>

#include "base/host_device.h"

namespace tandem {

constexpr int kRouterGroup = 16;
constexpr float kRouterBound = 4194304.0f;
constexpr float kRouterScale = 268435456.0f;
constexpr int64_t kMaxRouterWidth = int64_t{1} << 16;  // far below what would overflow a sum

TANDEM_HD constexpr int64_t router_groups(int64_t width) {
    return (width + kRouterGroup - 1) / kRouterGroup;
}

// A sum before the norm's factor.
TANDEM_HD float router_score(int64_t sum) {
    return static_cast<float>(sum) * (1.0f / kRouterScale);
}

}  // namespace tandem
