// The parts of attention_prompt: how a warp holds its queries, a tile of keys and values in shared memory, scores and sums.
//
// A warp has kRows neighbouring positions of one query head. In the register matrices of mma_f16 a lane has two rows, `group`
// and `group` + 8 with group = lane / 4, and of every eight columns the two at 2 * (lane % 4).
#pragma once
#include <cmath>
#include <cstdint>

#include "cuda_ops/rotary.cuh"

namespace tandem::cuda {

constexpr int kRows = 16;    // of a warp
constexpr int kColumns = 8;  // of one register matrix of scores or sums
constexpr int kStep = 16;    // summed by one multiplication
constexpr int kScoreBlocks = kKvTile / kColumns;
constexpr int kUnitHalves = 8;  // of a 16-byte unit

// Units of a shared row are exchanged within runs of kRun, by a number that changes from row to row: the eight rows that a
// matrix load reads together fall on different banks.
template <int kUnits>
struct UnitPlaces {
    static_assert(kUnits % 4 == 0);
    static constexpr int kRun = kUnits % 8 == 0 ? 8 : 4;

    static __device__ __forceinline__ int turn(int row) { return kRun == 8 ? row & 7 : row >> 1 & 3; }
    static __device__ __forceinline__ int of(int row, int unit) { return row * kUnits + (unit ^ turn(row)); }
    // Of row `row` + lane % 16, unit `unit` + lane / 16; row a multiple of 16, unit even. Written so that a lane needs few
    // addresses.
    static __device__ __forceinline__ int of_lane(int row, int unit, int lane) {
        const int within = (unit % kRun) ^ (lane / 16 ^ turn(lane % 16));
        return lane % 16 * kUnits + within + row * kUnits + unit / kRun * kRun;
    }
};

__device__ __forceinline__ uint32_t pack_halves(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &pair, sizeof(bits));
    return bits;
}

// Rows [kNumRows, kUnits units] of the cache as halves into shared memory; rows from `num_rows` on are zero where kZero.
template <int kNumRows, int kUnits, bool kZero>
__device__ __forceinline__ void start_tile(const __half* from, int num_rows, __half* to) {
    for (int i = static_cast<int>(threadIdx.x); i < kNumRows * kUnits; i += static_cast<int>(blockDim.x)) {
        const int row = i / kUnits;
        __half* place = to + UnitPlaces<kUnits>::of(row, i % kUnits) * kUnitHalves;
        if (!kZero || row < num_rows) {
            device::copy_async16(place, from + i * kUnitHalves);
        } else {
            *reinterpret_cast<uint4*>(place) = uint4{0, 0, 0, 0};
        }
    }
    device::copy_async_commit();
}

template <int kNumRows, int kUnits, bool kZero>
__device__ __forceinline__ void start_tile(const float* from, int num_rows, __half* to) {
    for (int i = static_cast<int>(threadIdx.x); i < kNumRows * kUnits; i += static_cast<int>(blockDim.x)) {
        const int row = i / kUnits;
        uint4 unit{0, 0, 0, 0};
        if (!kZero || row < num_rows) {
            const float4* x = reinterpret_cast<const float4*>(from + i * kUnitHalves);
            unit = {pack_halves(x[0].x, x[0].y), pack_halves(x[0].z, x[0].w), pack_halves(x[1].x, x[1].y),
                    pack_halves(x[1].z, x[1].w)};
        }
        *reinterpret_cast<uint4*>(to + UnitPlaces<kUnits>::of(row, i % kUnits) * kUnitHalves) = unit;
    }
    device::copy_async_commit();
}

// Starts the copy of `nbytes` bytes as they are, a multiple of 16.
__device__ __forceinline__ void start_copy(const int8_t* from, int nbytes, int8_t* to) {
    constexpr int kUnitBytes = 16;
    for (int i = static_cast<int>(threadIdx.x) * kUnitBytes; i < nbytes; i += static_cast<int>(blockDim.x) * kUnitBytes)
        device::copy_async16(to + i, from + i);
    device::copy_async_commit();
}

// Two values of int8 at their place in `selector` of four times their scales: the exact product, rounded once.
__device__ __forceinline__ uint32_t widen_to_halves(uint32_t four, uint32_t selector, const __half2& scales) {
    constexpr uint32_t kBiasBits = 0x64646464;  // 1024 + q + 128 as a half
    const uint32_t biased = device::permute(four ^ 0x80808080u, kBiasBits, selector);
    __half2 halves;
    memcpy(&halves, &biased, sizeof(halves));
    halves = __hmul2(__hsub2(halves, __float2half2_rn(1024 + 128)), scales);
    uint32_t bits;
    memcpy(&bits, &halves, sizeof(bits));
    return bits;
}

// A tile of int8 with its scales, [kNumRows, kUnits units], as halves into shared memory; rows from `num_rows` on are zero where
// they are positions.
template <int kNumRows, int kUnits, bool of_keys>
__device__ __forceinline__ void widen_tile(const int8_t* tile, int num_rows, __half* to) {
    constexpr int kPairUnits = kUnits / 2;  // sixteen values are loaded at once
    const __half* scales = scales_behind(tile, kNumRows * kUnits * kUnitHalves);
    for (int i = static_cast<int>(threadIdx.x); i < kNumRows * kPairUnits; i += static_cast<int>(blockDim.x)) {
        const int row = i / kPairUnits, column = i % kPairUnits * 2 * kUnitHalves;
        const uint4 q = reinterpret_cast<const uint4*>(tile)[i];
        const uint32_t fours[4] = {q.x, q.y, q.z, q.w};
        const __half* scale = scales + (of_keys ? row / kKvGroup * kKvTile + column : column / kKvGroup * kKvTile + row);
#pragma unroll
        for (int u = 0; u < 2; u++) {
            uint32_t words[4] = {};
            if (of_keys || row < num_rows) {
#pragma unroll
                for (int w = 0; w < 4; w++) {
                    const int first = u * kUnitHalves + 2 * w;
                    const __half2 both = of_keys ? reinterpret_cast<const __half2*>(scale)[first / 2] : __half2half2(*scale);
                    words[w] = widen_to_halves(fours[first / 4], w % 2 == 0 ? 0x4140 : 0x4342, both);
                }
            }
            *reinterpret_cast<uint4*>(to + UnitPlaces<kUnits>::of(row, column / kUnitHalves + u) * kUnitHalves) =
                uint4{words[0], words[1], words[2], words[3]};
        }
    }
}

// b: the two halves of a [kStep, 2 * kColumns] matrix from rows `row`.. and units `unit`, `unit` + 1 of a shared tile, as
// mma_f16 wants its second operand.
template <int kUnits>
__device__ __forceinline__ void load_columns(const __half* tile, int row, int unit, int lane, uint32_t (&b)[2][2]) {
    uint32_t r[4];
    // Lanes 0-7 name the first eight rows, 8-15 the next eight, 16-31 the same of the second unit.
    device::ldmatrix_x4_transposed(r, tile + UnitPlaces<kUnits>::of_lane(row, unit, lane) * kUnitHalves);
    b[0][0] = r[0];
    b[0][1] = r[1];
    b[1][0] = r[2];
    b[1][1] = r[3];
}

// Starts the copy of a warp's queries, `num` rows that lie `row_values` apart; the missing ones of kRows are zero.
template <int kUnits>
__device__ __forceinline__ void start_queries(const __half* from, int64_t row_values, int num, int lane, __half* to) {
    for (int i = lane; i < kRows * kUnits; i += kWarpLanes) {
        const int row = i / kUnits, unit = i % kUnits;
        __half* place = to + UnitPlaces<kUnits>::of(row, unit) * kUnitHalves;
        if (row < num) {
            device::copy_async16(place, from + row * row_values + unit * kUnitHalves);
        } else {
            *reinterpret_cast<uint4*>(place) = uint4{0, 0, 0, 0};
        }
    }
}

// scores += queries . keys; queries: [kRows, kDim], keys: [kDim, kKvTile]
template <int kDim>
__device__ __forceinline__ void score_rows(const __half* queries, const __half* keys, int lane, float (&scores)[kScoreBlocks][4]) {
#pragma unroll
    for (int step = 0; step < kDim / kStep; step++) {
        uint32_t a[4];
        constexpr int kStepUnits = kStep / kUnitHalves;
        device::ldmatrix_x4(a, queries + UnitPlaces<kDim / kUnitHalves>::of_lane(0, step * kStepUnits, lane) * kUnitHalves);
#pragma unroll
        for (int n = 0; n < kScoreBlocks; n += 2) {
            uint32_t b[2][2];
            load_columns<kScoreBlocks>(keys, step * kStep, n, lane, b);
            device::mma_f16(scores[n], a, b[0]);
            device::mma_f16(scores[n + 1], a, b[1]);
        }
    }
}

// Scores of positions beyond the row's own become -inf. `first`: the tile's first position less the warp's first.
__device__ __forceinline__ void mask_scores(int first, int lane, float (&scores)[kScoreBlocks][4]) {
#pragma unroll
    for (int n = 0; n < kScoreBlocks; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int column = first + n * kColumns + lane % 4 * 2 + i % 2, row = lane / 4 + i / 2 * 8;
            if (column > row) scores[n][i] = -INFINITY;
        }
}

// The softmax so far of the lane's two rows; `sum` of the lane's own columns only.
struct RunningSoftmax {
    float max[2];
    float sum[2];
};

// Turns scores into exp2((score - max') * factor); returns what earlier sums are multiplied by in `before`.
__device__ __forceinline__ void advance_rows(float factor, RunningSoftmax& state, float (&scores)[kScoreBlocks][4],
                                             float (&before)[2]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float max = state.max[r];
#pragma unroll
        for (int n = 0; n < kScoreBlocks; n++) max = fmaxf(max, fmaxf(scores[n][2 * r], scores[n][2 * r + 1]));
        max = fmaxf(max, __shfl_xor_sync(kWholeWarp, max, 1));
        max = fmaxf(max, __shfl_xor_sync(kWholeWarp, max, 2));
        before[r] = exp2f(__fmul_rn(__fadd_rn(state.max[r], -max), factor));
        const float shift = __fmul_rn(max, -factor);
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < kScoreBlocks; n++)
#pragma unroll
            for (int i = 2 * r; i < 2 * r + 2; i++) {
                scores[n][i] = exp2f(__fmaf_rn(scores[n][i], factor, shift));
                sum = __fadd_rn(sum, scores[n][i]);
            }
        state.sum[r] = __fmaf_rn(state.sum[r], before[r], sum);
        state.max[r] = max;
    }
}

// out = out * before. Once a row's maximum stands, `before` is exactly 1 and nothing changes.
template <int kBlocks>
__device__ __forceinline__ void scale_rows(const float (&before)[2], float (&out)[kBlocks][4]) {
    if (__ballot_sync(kWholeWarp, before[0] != 1.0f || before[1] != 1.0f) == 0) return;
#pragma unroll
    for (int n = 0; n < kBlocks; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) out[n][i] = __fmul_rn(out[n][i], before[i / 2]);
}

// out += weights . values; values: [kKvTile, kDim]
template <int kDim>
__device__ __forceinline__ void mix_rows(const __half* values, const float (&weights)[kScoreBlocks][4], int lane,
                                         float (&out)[kDim / kColumns][4]) {
#pragma unroll
    for (int k = 0; k < kKvTile / kStep; k++) {
        const float (&low)[4] = weights[2 * k], (&high)[4] = weights[2 * k + 1];
        const uint32_t a[4] = {pack_halves(low[0], low[1]), pack_halves(low[2], low[3]), pack_halves(high[0], high[1]),
                               pack_halves(high[2], high[3])};
#pragma unroll
        for (int n = 0; n < kDim / kColumns; n += 2) {
            uint32_t b[2][2];
            load_columns<kDim / kUnitHalves>(values, k * kStep, n, lane, b);
            device::mma_f16(out[n], a, b[0]);
            device::mma_f16(out[n + 1], a, b[1]);
        }
    }
}

}  // namespace tandem::cuda
