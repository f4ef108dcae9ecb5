// One layer's keys and values: where they lie, and how int8 rounds them.
//
// By head and tile of kKvTile positions, a tile in one piece:
//   keys:   [head_dim, kKvTile]   (a score kernel reads one dimension of all positions at once)
//   values: [kKvTile, head_dim]
// With int8 every group of kKvGroup neighbouring values of one head at one position has a scale in half precision; a head's last
// group may be shorter. The scales of a tile, [groups, kKvTile], lie behind its values.
//
// A group with the greatest magnitude `amax`: below 2^-100 all is zero; with a value that is not finite the scale is NaN, q zero;
// else scale = amax / 127 rounded up to half precision, at most 65504; q = rint(x * (1 / scale)), at most 127 either way. What
// is read is q * scale, which is exact in single precision, and no further than half a scale from x unless that limit was met.
#pragma once
#include <cstddef>

#include "ops/vector.h"
#include "quant/arithmetic.h"

namespace tandem {

enum class KvType { f16, f32, int8 };

TANDEM_HD constexpr int kv_value_bytes(KvType type) {
    return type == KvType::int8 ? 1 : type == KvType::f16 ? 2 : 4;
}
TANDEM_HD constexpr int kv_scale_bytes(KvType type) {
    return type == KvType::int8 ? 2 : 0;
}
// One position of one head.
TANDEM_HD constexpr int kv_row_bytes(KvType type, int head_dim) {
    return head_dim * kv_value_bytes(type) + kv_groups(head_dim) * kv_scale_bytes(type);
}
// A multiple of 64.
TANDEM_HD constexpr int kv_tile_bytes(KvType type, int head_dim) {
    return kKvTile * kv_row_bytes(type, head_dim);
}

struct KvLayer {
    KvType type;
    int num_heads;
    int head_dim;
    int64_t num_tiles;
    std::byte* keys;    // [num_heads, num_tiles] tiles
    std::byte* values;  // the same

    int64_t tile_at(int head, int64_t tile) const { return (head * num_tiles + tile) * kv_tile_bytes(type, head_dim); }
    std::byte* key_tile(int head, int64_t tile) const { return keys + tile_at(head, tile); }
    std::byte* value_tile(int head, int64_t tile) const { return values + tile_at(head, tile); }
};

struct KvScale {
    uint16_t half;
    float inverse;  // multiplies the values; 0: they become zero
};

// The least half that is not below x, which is positive; at most 65504.
TANDEM_HD uint16_t half_from_below(float x) {
    using namespace quant;
    constexpr uint32_t kLeastNormal = 0x38800000, kGreatest = 0x7bff;
    if (float_bits(x) < kLeastNormal) {
        const float units = mul(x, 0x1p24f);  // exact
        const int whole = static_cast<int>(units);
        return static_cast<uint16_t>(whole + (static_cast<float>(whole) < units ? 1 : 0));
    }
    const uint32_t half = (float_bits(x) - (112u << 23) + 0x1fff) >> 13;
    return static_cast<uint16_t>(half < kGreatest ? half : kGreatest);
}

// `amax`: bits of a group's greatest magnitude.
TANDEM_HD KvScale kv_scale(uint32_t amax) {
    using namespace quant;
    constexpr uint16_t kHalfNan = 0x7e00;
    if (amax < kTiny) return {0, 0.0f};
    if (amax >= kInfinity) return {kHalfNan, 0.0f};
    const uint16_t half = half_from_below(div(bits_float(amax), 127.0f));
    return {half, div(1.0f, f16_float(half))};
}

TANDEM_HD int8_t kv_rounded(float x, const KvScale& scale) {
    if (scale.inverse == 0.0f) return 0;
    const float scaled = quant::mul(x, scale.inverse);
    return static_cast<int8_t>(quant::round_int(scaled < -127.0f ? -127.0f : scaled > 127.0f ? 127.0f : scaled));
}

}  // namespace tandem
