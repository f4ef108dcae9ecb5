// The frame of dot_rows for one type: which lane takes which block, and the canonical order of the sums.
//
//   more than 512 columns   all lanes take one row: lane = 8 * q + place. A run of eight super-blocks is added by a tree; q takes
//                           super-blocks 2 q and 2 q + 1 of it, or only q where the run has no more than four
//   257 .. 512              half warps take different rows, q < 2
//   up to 256               quarter warps take different rows
//
// The sums of kSteps * kInputs results cross the lanes together: where two lanes add, each first gives the other half of its
// results away, so that n results cost n - 1 exchanges and not n per level of the tree.
#pragma once
#include <cuda_runtime.h>

#include "quant/packed/all.cuh"
#include "quant/packed/block_dot.cuh"
#include "quant/row_device.cuh"

namespace tandem::quant {

// ---- sums over lanes ----

// One level: lanes that differ in `mask` add. `count` results a lane become half as many while there are several.
template <int count, int size>
__device__ __forceinline__ void add_across(float (&v)[size], int mask, int lane) {
    if constexpr (count == 1) {
        v[0] = add(v[0], __shfl_xor_sync(~0u, v[0], mask));
    } else {
        const bool upper = (lane & mask) != 0;
#pragma unroll
        for (int i = 0; i < count / 2; i++) {
            const float kept = upper ? v[2 * i + 1] : v[2 * i], given = upper ? v[2 * i] : v[2 * i + 1];
            v[i] = add(kept, __shfl_xor_sync(~0u, given, mask));
        }
    }
}
template <int count, int levels>
inline constexpr int kHalved = (count >> levels) > 1 ? count >> levels : 1;

// The lane masks of the levels in order: super-blocks, then places. kRows: rows side by side in the warp, 1, 2 or 4.
template <int kRows>
struct LaneTree {
    static constexpr int kSupers = kRows == 1 ? 2 : kRows == 2 ? 1 : 0;  // levels over super-blocks
    static constexpr int kAll = kSupers + 3;
    __device__ __forceinline__ static constexpr int mask(int level) {
        return level < kSupers ? 8 << level : 4 >> (level - kSupers);
    }
};

template <int kRows, int kCount, int kLevel, int kEnd, int size>
__device__ __forceinline__ void add_levels(float (&v)[size], int lane) {
    if constexpr (kLevel < kEnd) {
        add_across<kHalved<kCount, kLevel>>(v, LaneTree<kRows>::mask(kLevel), lane);
        add_levels<kRows, kCount, kLevel + 1, kEnd>(v, lane);
    }
}

// ---- one batch: kSteps * kRows weight rows by up to kInputs input rows ----

// Whoever holds result `index` of the batch after all levels.
struct Holder {
    int index;
    bool writes;  // one of the lanes that hold it
};

template <int kRows, int kCount>
__device__ __forceinline__ Holder holder_of(int lane) {
    using Tree = LaneTree<kRows>;
    Holder holder{0, true};
#pragma unroll
    for (int level = 0; level < Tree::kAll; level++) {
        const bool upper = (lane & Tree::mask(level)) != 0;
        if ((kCount >> level) > 1)
            holder.index |= upper << level;
        else
            holder.writes &= !upper;
    }
    return holder;
}

// Adds the terms of one super-block's block at `place` to v[step * kInputs + input].
template <class T, int kRows, int kSteps, int kInputs>
__device__ __forceinline__ void add_terms(const SharedDots& p, int first_row, int group, int place, float (&v)[kSteps * kInputs]) {
    constexpr int per_block = T::block_values / kBlock;
    const int block = kBlocks * group + place;
    const uint8_t* table = device::dynamic_shared() + p.table;
    uint32_t w[kSteps][8];
    PackedScale scale[kSteps];
    ActBlock x;
    if constexpr (kInputs == 1) x = load_act_block(p.groups(0)[group], place);
#pragma unroll
    for (int step = 0; step < kSteps; step++) {
        const int row = min(first_row + step * kRows, p.num_rows - 1);
        const uint8_t* b = p.row(row) + block / per_block * static_cast<int>(sizeof(typename T::Block));
        Packed<T>::words(b, block % per_block, table, w[step]);
        scale[step] = Packed<T>::scale(b, block % per_block);
        if constexpr (kInputs == 1) v[step] = add(v[step], block_term<T>(w[step], scale[step], x));
    }
    if constexpr (kInputs > 1) {
#pragma unroll
        for (int input = 0; input < kInputs; input++) {
            if (input >= p.num_inputs) break;
            x = load_act_block(p.groups(input)[group], place);
#pragma unroll
            for (int step = 0; step < kSteps; step++) {
                float& sum = v[step * kInputs + input];
                sum = add(sum, block_term<T>(w[step], scale[step], x));
            }
        }
    }
}

// A run of up to eight super-blocks from `begin` on, as far as it lies in one lane.
template <class T, int kRows, int kSteps, int kInputs>
__device__ __forceinline__ void add_run(const SharedDots& p, int first_row, int begin, int lane, float (&v)[kSteps * kInputs]) {
    const int place = lane % kBlocks, q = lane / kBlocks % (4 / kRows);
    const int num_blocks = p.columns / kBlock;
    const int supers = kRows == 1 && p.num_groups() - begin > 4 ? 2 : 1;  // of a lane
#pragma unroll(kSteps* kInputs == 1 ? 2 : 1)
    for (int u = 0; u < supers; u++) {
        const int group = begin + supers * q + u;
        if (kBlocks * group + place < num_blocks) add_terms<T, kRows, kSteps, kInputs>(p, first_row, group, place, v);
    }
}

// Rows first_row + step * kRows + (the lane's place among kRows); first_row < num_rows.
template <class T, int kRows, int kSteps, int kInputs>
__device__ __forceinline__ void dot_batch(const SharedDots& p, int first_row, int lane) {
    using Tree = LaneTree<kRows>;
    constexpr int count = kSteps * kInputs, kept = kHalved<count, Tree::kSupers>;
    const int lane_row = first_row + lane / (32 / kRows);
    float sums[kept] = {};
    for (int begin = 0; begin < p.num_groups(); begin += kTree) {
        float v[count] = {};
        add_run<T, kRows, kSteps, kInputs>(p, lane_row, begin, lane, v);
        add_levels<kRows, count, 0, Tree::kSupers>(v, lane);
#pragma unroll
        for (int i = 0; i < kept; i++) sums[i] = add(sums[i], v[i]);
    }
    add_levels<kRows, count, Tree::kSupers, Tree::kAll>(sums, lane);
    const Holder holder = holder_of<kRows, count>(lane);
    const int row = lane_row + holder.index / kInputs * kRows, input = holder.index % kInputs;
    if (holder.writes && row < p.num_rows && input < p.num_inputs) p.out[input * p.out_stride + row] = add(sums[0], 0.0f);
}

// As many batches of kSteps as there are rows for, then halves.
template <class T, int kRows, int kSteps, int kInputs>
__device__ __forceinline__ void dot_batches(const SharedDots& p, int row, int lane) {
    for (; row + (kSteps - 1) * kRows < p.num_rows; row += kSteps * kRows) dot_batch<T, kRows, kSteps, kInputs>(p, row, lane);
    if constexpr (kSteps > 1) dot_batches<T, kRows, kSteps / 2, kInputs>(p, row, lane);
}

template <class T, int kSteps, int kInputs>
__device__ __forceinline__ void dot_blocks(const SharedDots& p, int lane) {
    if (p.columns > 2 * kSuper)
        dot_batches<T, 1, kSteps, kInputs>(p, 0, lane);
    else if (p.columns > kSuper)
        dot_batches<T, 2, kSteps, kInputs>(p, 0, lane);
    else
        dot_batches<T, 4, kSteps, kInputs>(p, 0, lane);
}

// ---- F32, F16, BF16: a lane has one of the 32 chains ----

__device__ __forceinline__ float float_weight(const F32::Block* w) {
    return *reinterpret_cast<const float*>(w);
}
__device__ __forceinline__ float float_weight(const F16::Block* w) {
    return f16_float(*reinterpret_cast<const uint16_t*>(w));
}
__device__ __forceinline__ float float_weight(const BF16::Block* w) {
    return bits_float(static_cast<uint32_t>(*reinterpret_cast<const uint16_t*>(w)) << 16);
}

template <class T, int kSteps, int kInputs>
__device__ __forceinline__ void dot_float_batch(const SharedDots& p, int first_row, int lane) {
    float sums[kSteps][kInputs] = {};
    const typename T::Block* rows[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; step++)
        rows[step] = reinterpret_cast<const typename T::Block*>(p.row(min(first_row + step, p.num_rows - 1)));
#pragma unroll 2
    for (int i = lane; i < p.columns; i += kBlock) {
        float w[kSteps];
#pragma unroll
        for (int step = 0; step < kSteps; step++) w[step] = float_weight(rows[step] + i);
#pragma unroll
        for (int input = 0; input < kInputs; input++) {
            if (input >= p.num_inputs) break;
            const float x = p.values(input)[i];
#pragma unroll
            for (int step = 0; step < kSteps; step++) sums[step][input] = fma(w[step], x, sums[step][input]);
        }
    }
#pragma unroll
    for (int step = 0; step < kSteps; step++)
#pragma unroll
        for (int input = 0; input < kInputs; input++) {
            float sum = sums[step][input];
#pragma unroll
            for (int mask = 16; mask > 0; mask /= 2) sum = add(sum, __shfl_xor_sync(~0u, sum, mask));
            if (lane == 0 && first_row + step < p.num_rows && input < p.num_inputs)
                p.out[input * p.out_stride + first_row + step] = add(sum, 0.0f);
        }
}

template <class T, int kSteps, int kInputs>
__device__ __forceinline__ void dot_floats(const SharedDots& p, int lane) {
    for (int row = 0; row < p.num_rows; row += kSteps) dot_float_batch<T, kSteps, kInputs>(p, row, lane);
}

}  // namespace tandem::quant
