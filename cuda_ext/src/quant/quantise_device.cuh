// Activations to int8 on the card (docs/arithmetic.md), a warp at a time.
#pragma once
#include <cuda_runtime.h>

#include "quant/arithmetic.h"
#include "quant/shared_group.cuh"

namespace tandem::quant {

// Values 8 * lane .. 8 * lane + 7 of a super-block into shared memory. All 32 lanes call together; values
// beyond a row's end are zero, so that the last group of a row is padded with zero blocks. Lanes write what belongs to them: a
// barrier must stand before others read it.
__device__ __forceinline__ void quantise_super(const float (&x)[8], float row_scale, SharedGroup& group, int lane) {
    uint32_t amax = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) amax = max(amax, float_bits(x[i]) & 0x7fffffff);
#pragma unroll
    for (int step = 1; step < 4; step *= 2) amax = max(amax, __shfl_xor_sync(~0u, amax, step));
    const BlockScales scales = block_scales(amax, row_scale);
    uint32_t packed[2] = {};
    int sum = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int q = scales.inverse == 0.0f ? 0 : round_int(mul(x[i], scales.inverse));
        packed[i / 4] |= static_cast<uint32_t>(q & 255) << 8 * (i % 4);
        sum += q;
    }
    sum += __shfl_xor_sync(~0u, sum, 1);
    *reinterpret_cast<uint2*>(group.q + 16 * shared_unit(lane / 2) + 8 * (lane % 2)) = {packed[0], packed[1]};
    if (lane % 4 == 0) group.d[lane / 4] = scales.d;
    if (lane % 2 == 0) group.sum16[lane / 2] = static_cast<int16_t>(sum);
}

}  // namespace tandem::quant
