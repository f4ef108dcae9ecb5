// Activations to int8 on the card (docs/arithmetic.md), a warp at a time.
#pragma once
#include <cuda_runtime.h>

#include "quant/arithmetic.h"
#include "quant/row.h"

namespace tandem::quant {

constexpr int kWarpValues = 128;  // quantised by one call of quantise_values

// Values 4 * lane .. of 128 values that begin at value `first` (a multiple of 128) of a row; `row` [groups of the row] lies in
// shared or global memory. All 32 lanes call together; values beyond the row's end are zero, so that a last group is padded with
// zero blocks where all of it is written. Lanes write what belongs to them: a barrier must stand before others read it.
__device__ __forceinline__ void quantise_values(const float (&x)[4], float row_scale, ActGroup* row, int first, int lane) {
    uint32_t amax = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) amax = max(amax, float_bits(x[i]) & 0x7fffffff);
#pragma unroll
    for (int step = 1; step < 8; step *= 2) amax = max(amax, __shfl_xor_sync(~0u, amax, step));
    const BlockScales scales = block_scales(amax, row_scale);
    uint32_t packed = 0;
    int sum = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int q = scales.inverse == 0.0f ? 0 : round_int(mul(x[i], scales.inverse));
        packed |= static_cast<uint32_t>(q & 255) << 8 * i;
        sum += q;
    }
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const int value = first + 4 * lane, place = value % kSuper;
    ActGroup& group = row[value / kSuper];
    *reinterpret_cast<uint32_t*>(group.q + place) = packed;
    if (lane % 8 == 0) group.d[place / kBlock] = scales.d;
    if (lane % 4 == 0) group.sum16[place / 16] = static_cast<int16_t>(sum);
}

}  // namespace tandem::quant
