// Dot products with several input rows for one type: which lane takes which block, and the canonical order of the sums.
//
//   more than 512 columns   the whole warp takes one row: lane = 8 * q + place. A run of eight super-blocks is added by a tree; q
//                           takes super-blocks 2 q and 2 q + 1 of it, or only q where the run has no more than four
//   257 .. 512              half warps take different rows, q < 2
//   up to 256               quarter warps take different rows
//
// The sums of kSteps * kInputs results cross the lanes together: where two lanes add, each first gives the other half of its
// results away, so that n results cost n - 1 exchanges and not n per level of the tree.
#pragma once
#include <cuda_runtime.h>

#include "quant/float_weight.cuh"
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

// The lane masks of the levels in order. kWhole: the whole warp takes one row, and the first two levels are over super-blocks;
// else there is at most one such level, and it comes before these.
template <bool kWhole>
struct LaneTree {
    static constexpr int kSupers = kWhole ? 2 : 0;
    static constexpr int kAll = kSupers + 3;
    __device__ __forceinline__ static constexpr int mask(int level) {
        return level < kSupers ? 8 << level : 4 >> (level - kSupers);
    }
};

template <bool kWhole, int kCount, int kLevel, int kEnd, int size>
__device__ __forceinline__ void add_levels(float (&v)[size], int lane) {
    if constexpr (kLevel < kEnd) {
        add_across<kHalved<kCount, kLevel>>(v, LaneTree<kWhole>::mask(kLevel), lane);
        add_levels<kWhole, kCount, kLevel + 1, kEnd>(v, lane);
    }
}

// ---- one batch: kSteps * (rows side by side) weight rows by up to kInputs input rows ----

// How the warp is shared: `side` rows side by side, 1, 2 or 4. The lane has a place of one of them, and super-blocks from q on.
struct LanePlace {
    int lane;
    int side;

    template <bool kWhole>
    __device__ __forceinline__ static LanePlace of(const SharedDots& p) {
        return {p.lane(), kWhole ? 1 : p.columns > kSuper ? 2 : 4};
    }
    __device__ __forceinline__ int row() const { return lane * side / 32; }
    __device__ __forceinline__ int q() const { return lane / kBlocks % (4 / side); }
    __device__ __forceinline__ int place() const { return lane % kBlocks; }
};

// After all levels a lane holds the results `index`, `index` + 8, ... of a batch (one only where there are up to eight).
struct Holder {
    int index;
    bool writes;  // one of the lanes that hold it
};

template <bool kWhole, int kCount>
__device__ __forceinline__ Holder holder_of(const LanePlace& at) {
    using Tree = LaneTree<kWhole>;
    Holder holder{0, kWhole || at.q() == 0};
#pragma unroll
    for (int level = 0; level < Tree::kAll; level++) {
        const bool upper = (at.lane & Tree::mask(level)) != 0;
        if ((kCount >> level) > 1)
            holder.index |= upper << level;
        else
            holder.writes &= !upper;
    }
    return holder;
}

// Adds the terms of one super-block's block at the lane's place to v[step * kInputs + input].
template <class T, int kSteps, int kInputs>
__device__ __forceinline__ void add_terms(const SharedDots& p, const LanePlace& at, int first_row, int group,
                                          float (&v)[kSteps * kInputs]) {
    constexpr int per_block = T::block_values / kBlock;
    const int block = kBlocks * group + at.place();
    const uint8_t* table = device::shared_pointer(p.table);
    uint32_t w[kSteps][8];
    PackedScale scale[kSteps];
    const int turned = at.place() % 2;
#pragma unroll
    for (int step = 0; step < kSteps; step++) {
        const int row = min(first_row + step * at.side, p.num_rows() - 1);
        const uint8_t* b = p.row(row) + block / per_block * static_cast<int>(sizeof(typename T::Block));
        Packed<T>::words(b, block % per_block, table, w[step]);
        scale[step] = Packed<T>::scale(b, block % per_block);
        turn_weights<T>(w[step], scale[step], turned);
    }
#pragma unroll
    for (int input = 0; input < kInputs; input++) {
        if (input >= p.num_inputs()) break;
        const ActBlock x = load_act_block(p.groups(input)[group], at.place(), turned);
#pragma unroll
        for (int step = 0; step < kSteps; step++) {
            float& sum = v[step * kInputs + input];
            sum = add(sum, block_term<T>(w[step], scale[step], x.q, x.d, x.sum));
        }
    }
}

// A run of up to eight super-blocks from `begin` on, as far as it lies in one lane.
template <class T, bool kWhole, int kSteps, int kInputs>
__device__ __forceinline__ void add_run(const SharedDots& p, const LanePlace& at, int first_row, int begin,
                                        float (&v)[kSteps * kInputs]) {
    const int num_blocks = p.columns / kBlock;
    const int supers = kWhole && p.num_groups() - begin > 4 ? 2 : 1;  // of a lane
#pragma unroll 1
    for (int u = 0; u < supers; u++) {
        const int group = begin + supers * at.q() + u;
        if (kBlocks * group + at.place() < num_blocks) add_terms<T, kSteps, kInputs>(p, at, first_row, group, v);
    }
}

// Rows first_row + step * side + (the lane's row of those side by side); first_row < num_rows.
template <class T, bool kWhole, int kSteps, int kInputs>
__device__ __forceinline__ void dot_batch(const SharedDots& p, const LanePlace& at, int first_row) {
    using Tree = LaneTree<kWhole>;
    constexpr int count = kSteps * kInputs, kept = kHalved<count, Tree::kSupers>;
    const int lane_row = first_row + at.row();
    float sums[kept] = {};
    for (int begin = 0; begin < p.num_groups(); begin += kTree) {
        float v[count] = {};
        add_run<T, kWhole, kSteps, kInputs>(p, at, lane_row, begin, v);
        add_levels<kWhole, count, 0, Tree::kSupers>(v, at.lane);
        if (!kWhole && at.side == 2)
#pragma unroll
            for (int i = 0; i < count; i++) v[i] = add(v[i], __shfl_xor_sync(~0u, v[i], kBlocks));
#pragma unroll
        for (int i = 0; i < kept; i++) sums[i] = add(sums[i], v[i]);
    }
    add_levels<kWhole, count, Tree::kSupers, Tree::kAll>(sums, at.lane);
    const Holder holder = holder_of<kWhole, count>(at);
#pragma unroll
    for (int i = 0; i < kHalved<count, Tree::kAll>; i++) {
        const int index = holder.index + (i << Tree::kAll);
        const int row = lane_row + index / kInputs * at.side, input = index % kInputs;
        if (holder.writes && row < p.num_rows() && input < p.num_inputs()) p.out[input * p.out_stride + row] = add(sums[i], 0.0f);
    }
}

// As many batches of kSteps as there are rows for, then halves.
template <class T, bool kWhole, int kSteps, int kInputs>
__device__ __forceinline__ void dot_batches(const SharedDots& p, const LanePlace& at, int row) {
    for (; row + (kSteps - 1) * at.side < p.num_rows(); row += kSteps * at.side) dot_batch<T, kWhole, kSteps, kInputs>(p, at, row);
    if constexpr (kSteps > 1) dot_batches<T, kWhole, kSteps / 2, kInputs>(p, at, row);
}

template <class T, int kSteps, int kInputs>
__device__ __forceinline__ void dot_several_blocks(const SharedDots& p) {
    if (p.columns > 2 * kSuper)
        dot_batches<T, true, kSteps, kInputs>(p, LanePlace::of<true>(p), 0);
    else
        dot_batches<T, false, kSteps, kInputs>(p, LanePlace::of<false>(p), 0);
}

// ---- F32, F16, BF16: a lane has one of the 32 chains ----

template <class T, int kSteps, int kInputs>
__device__ __forceinline__ void dot_float_batch(const SharedDots& p, int first_row, int lane) {
    float sums[kSteps][kInputs] = {};
    const typename T::Block* rows[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; step++)
        rows[step] = reinterpret_cast<const typename T::Block*>(p.row(min(first_row + step, p.num_rows() - 1)));
#pragma unroll 2
    for (int i = lane; i < p.columns; i += kBlock) {
        float w[kSteps];
#pragma unroll
        for (int step = 0; step < kSteps; step++) w[step] = float_weight(rows[step] + i);
#pragma unroll
        for (int input = 0; input < kInputs; input++) {
            if (input >= p.num_inputs()) break;
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
            if (lane == 0 && first_row + step < p.num_rows() && input < p.num_inputs())
                p.out[input * p.out_stride + first_row + step] = add(sum, 0.0f);
        }
}

template <class T, int kSteps, int kInputs>
__device__ __forceinline__ void dot_several_floats(const SharedDots& p) {
    for (int row = 0; row < p.num_rows(); row += kSteps) dot_float_batch<T, kSteps, kInputs>(p, row, p.lane());
}

}  // namespace tandem::quant
