// Quantised activations in shared memory: an ActGroup whose chunks of sixteen q stand transposed.
//
// A chunk is half a block; chunk c of the two blocks 2 i and 2 i + 1 lies at 4 c + i. Lanes that take neighbouring pairs of blocks
// then read neighbouring chunks, and no two of them meet in a bank.
#pragma once
#include <cuda_runtime.h>

#include "quant/row.h"

namespace tandem::quant {

struct alignas(64) SharedGroup {
    int8_t q[256];
    float d[8];
    int16_t sum16[16];
};
static_assert(sizeof(SharedGroup) == sizeof(ActGroup));

constexpr int kGroupUnits = sizeof(ActGroup) / 16;  // of sixteen bytes

// Where unit `unit` of an ActGroup lies in a SharedGroup, and the other way round.
__device__ __forceinline__ int shared_unit(int unit) {
    return unit < 16 ? 4 * (unit % 4) + unit / 4 : unit;
}

// Units `thread`, `thread` + `num_threads`, ... of groups into shared memory. A barrier must follow.
__device__ __forceinline__ void load_groups(const ActGroup* from, SharedGroup* to, int num_groups, int thread, int num_threads) {
    const auto* units = reinterpret_cast<const uint4*>(from);
#pragma unroll 2
    for (int i = thread; i < num_groups * kGroupUnits; i += num_threads) {
        const int group = i / kGroupUnits;
        reinterpret_cast<uint4*>(to + group)[shared_unit(i - group * kGroupUnits)] = __ldcg(units + i);
    }
}

// The same the other way.
__device__ __forceinline__ void store_groups(const SharedGroup* from, ActGroup* to, int num_groups, int thread, int num_threads) {
    for (int i = thread; i < num_groups * kGroupUnits; i += num_threads) {
        const int group = i / kGroupUnits;
        reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from + group)[shared_unit(i - group * kGroupUnits)];
    }
}

}  // namespace tandem::quant
