// Dot products with one input row for one type, in little code: a launch runs it a few times only, and fetching instructions takes
// longer than running them.
//
// A lane takes two neighbouring blocks of a super-block (a pair), four lanes a super-block:
//
//   more than 1,024 columns   the whole warp takes one row: lane = 4 * super-block + pair, and runs of eight super-blocks
//   up to 1,024               eight rows side by side: lane = 4 * row + pair, super-blocks one after the other
//
// The order of the sums is the canonical one (docs/arithmetic.md). A zero's sign may differ on the way; the last sum makes it +0.
#pragma once
#include <cuda_runtime.h>

#include <type_traits>

#include "quant/float_weight.cuh"
#include "quant/packed/all.cuh"
#include "quant/packed/block_dot.cuh"
#include "quant/row_device.cuh"

namespace tandem::quant {

constexpr int kPairs = kBlocks / 2;       // of a super-block
constexpr int kSideBySide = 32 / kPairs;  // rows of up to kSideSupers super-blocks
constexpr int kSideSupers = 4;
constexpr int kRowsAtOnce = 2;  // of a whole warp

// Scales of the blocks 2 * pair and 2 * pair + 1 of super-block `b`.
template <class T>
__device__ __forceinline__ void pair_scales(const uint8_t* b, int pair, PackedScale (&s)[2]) {
    if constexpr (requires { Packed<T>::scales(b, pair, s); }) {
        Packed<T>::scales(b, pair, s);
    } else {
        s[0] = Packed<T>::scale(b, 2 * pair);
        s[1] = Packed<T>::scale(b, 2 * pair + 1);
    }
}

// Terms of the blocks 2 * pair and 2 * pair + 1 of super-block `group`; zero beyond the row's end.
template <class T>
__device__ __forceinline__ void pair_terms(const SharedDots& p, const uint8_t* row, int group, int pair, const ActPair& x,
                                           float (&t)[2]) {
    constexpr int per_block = T::block_values / kBlock, size = static_cast<int>(sizeof(typename T::Block));
    const uint8_t* table = device::shared_pointer(p.table);
    uint32_t w[8];
    if constexpr (per_block == kBlocks) {
        const uint8_t* b = row + group * size;
        PackedScale s[2];
        pair_scales<T>(b, pair, s);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            Packed<T>::words(b, 2 * pair + i, table, w);
            t[i] = block_term<T>(w, s[i], x.q[i], x.d[i], x.sum[i]);
        }
    } else {
        const int first = kBlocks * group + 2 * pair, num_blocks = p.columns / kBlock;
        t[0] = t[1] = 0.0f;
        if (first >= num_blocks) return;
        const bool both = first + 1 < num_blocks;
#pragma unroll
        for (int i = 0; i < 2; i++) {  // one branch around both: they share loads
            const int block = first + (both ? i : 0), j = block % per_block;
            const uint8_t* b = row + block / per_block * size;
            Packed<T>::words(b, j, table, w);
            t[i] = block_term<T>(w, Packed<T>::scale(b, j), x.q[i], x.d[i], x.sum[i]);
        }
        if (!both) t[1] = 0.0f;
    }
}

__device__ __forceinline__ float add_lanes(float v, int mask) {
    return add(v, __shfl_xor_sync(~0u, v, mask));
}

// The lanes that differ in `mask` add: one keeps `low`, the other, `upper`, keeps `high`.
__device__ __forceinline__ float add_halves(float low, float high, int mask, bool upper) {
    const float kept = upper ? high : low, given = upper ? low : high;
    return add(kept, __shfl_xor_sync(~0u, given, mask));
}

// Two rows at a time: the sums of up to eight super-blocks. Of each two lanes that differ in 4 the lower one sums the even blocks,
// of two that differ in 8 the lower one has the first row.
template <class T>
__device__ __forceinline__ float run_of_groups(const SharedDots& p, int row, bool has_second, int group, bool exists,
                                               const ActPair& x) {
    const int lane = p.lane(), pair = lane % kPairs;
    const bool odd = (lane & 4) != 0, second = (lane & 8) != 0;
    float t[kRowsAtOnce][2] = {};
    if (exists) {
        pair_terms<T>(p, p.row(row), group, pair, x, t[0]);
        if (has_second) pair_terms<T>(p, p.row(row + 1), group, pair, x, t[1]);
    }
    const float first_row = add_halves(t[0][0], t[0][1], 4, odd), second_row = add_halves(t[1][0], t[1][1], 4, odd);
    return add_lanes(add_halves(first_row, second_row, 8, second), 16);
}

// One row of nine to sixteen super-blocks: its two runs side by side, as if they were two rows.
template <class T>
__device__ __forceinline__ float two_runs(const SharedDots& p, int super, int num_groups) {
    const int lane = p.lane(), pair = lane % kPairs, second = super + kTree;
    float first_run[2], second_run[2] = {};
    pair_terms<T>(p, p.row(0), super, pair, load_act_pair(p.groups(0)[super], pair), first_run);
    if (second < num_groups) pair_terms<T>(p, p.row(0), second, pair, load_act_pair(p.groups(0)[second], pair), second_run);
    const bool odd = (lane & 4) != 0;
    const float sum = add_halves(add_halves(first_run[0], first_run[1], 4, odd), add_halves(second_run[0], second_run[1], 4, odd),
                                 8, (lane & 8) != 0);
    return add_lanes(add_lanes(sum, 16), 8);
}

template <class T>
__device__ __forceinline__ void dot_whole(const SharedDots& p) {
    const int lane = p.lane(), pair = lane % kPairs, super = lane / kPairs, num_groups = p.num_groups();
    const bool is_one_run = num_groups <= kTree;
    ActPair x{};
    if (super < num_groups) x = load_act_pair(p.groups(0)[super], pair);
#pragma unroll 1
    for (int row = 0; row < p.num_rows(); row += kRowsAtOnce) {
        const bool has_second = row + 1 < p.num_rows();
        float sum = 0.0f;
        if (is_one_run) {
            sum = run_of_groups<T>(p, row, has_second, super, super < num_groups, x);
        } else if (p.num_rows() == 1 && num_groups <= 2 * kTree) {
            sum = two_runs<T>(p, super, num_groups);
        } else {
#pragma unroll 1
            for (int group = super; group - super < num_groups; group += kTree) {
                if (group < num_groups) x = load_act_pair(p.groups(0)[group], pair);
                sum = add(sum, run_of_groups<T>(p, row, has_second, group, group < num_groups, x));
            }
        }
        sum = add_lanes(add_lanes(add_lanes(sum, 2), 1), 4);
        const int mine = row + ((lane & 8) != 0);
        if ((lane & ~8) == 0 && mine < p.num_rows()) p.out[mine] = add(sum, 0.0f);
    }
}

template <class T>
__device__ __forceinline__ void dot_side_by_side(const SharedDots& p) {
    const int lane = p.lane(), pair = lane % kPairs, side = lane / kPairs, num_groups = p.num_groups();
#pragma unroll 1
    for (int first = 0; first < p.num_rows(); first += kSideBySide) {
        const uint8_t* row = p.row(min(first + side, p.num_rows() - 1));
        float low[2] = {}, high[2] = {};  // super-blocks 0 and 1, 2 and 3
#pragma unroll 1
        for (int group = 0; group < num_groups; group++) {
            float t[2];
            pair_terms<T>(p, row, group, pair, load_act_pair(p.groups(0)[group], pair), t);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                low[i] = group < 2 ? add(low[i], t[i]) : low[i];
                high[i] = group < 2 ? high[i] : add(high[i], t[i]);
            }
        }
        float sums[2];
#pragma unroll
        for (int i = 0; i < 2; i++) sums[i] = add_lanes(add_lanes(add(low[i], high[i]), 2), 1);
        const int mine = first + side;
        if (pair == 0 && mine < p.num_rows()) p.out[mine] = add(add(sums[0], sums[1]), 0.0f);
    }
}

template <class T>
constexpr bool is_float_type = std::is_same_v<T, F32> || std::is_same_v<T, F16> || std::is_same_v<T, BF16>;

template <class T>
__device__ __forceinline__ void dot_one_blocks(const SharedDots& p) {
    if (p.num_groups() > kSideSupers)
        dot_whole<T>(p);
    else
        dot_side_by_side<T>(p);
}

// F32, F16, BF16: a lane has one of the 32 chains.
template <class T>
__device__ __forceinline__ void dot_one_floats(const SharedDots& p) {
    const int lane = p.lane();
    const float* x = p.values(0);
#pragma unroll 1
    for (int row = 0; row < p.num_rows(); row++) {
        const auto* w = reinterpret_cast<const typename T::Block*>(p.row(row));
        float sum = 0.0f;
#pragma unroll 8
        for (int i = lane; i < p.columns; i += kBlock) sum = fma(float_weight(w + i), x[i], sum);
#pragma unroll
        for (int mask = 16; mask > 0; mask /= 2) sum = add_lanes(sum, mask);
        if (lane == 0) p.out[row] = add(sum, 0.0f);
    }
}

// What a kernel of a window is compiled for: with a type's own struct (types/), for one row and weights of that type; else
struct AnyType {};   // for one row or several, of any types, by the functions of row_device.cuh
struct EachType {};  // for one row, of any types, by a switch

template <class T>
constexpr bool kOneRow = !std::is_same_v<T, AnyType>;

// Of a lambda in a kernel. Without it the compiler may make it a function, whose registers the kernel's launch bounds do not limit.
#define TANDEM_INLINE_BODY __attribute__((always_inline))

// act.operator()<T>() for the type.
template <class Act>
__device__ __forceinline__ void with_type(Type type, const Act& act) {
    switch (type) {
#define TANDEM_CASE(name, number) \
    case Type::name:              \
        return act.template operator()<name>();
        TANDEM_QUANT_TYPES(TANDEM_CASE)
#undef TANDEM_CASE
    }
}

// All 32 lanes call together. But for AnyType the only input row is the first of `input_rows`; a type's own struct is that of
// `type`.
template <class T>
__device__ __forceinline__ void dot_window_rows(Type type, const RowDots& p, int lane) {
    if constexpr (std::is_same_v<T, AnyType>)
        dot_rows(type, p, lane);
    else if constexpr (std::is_same_v<T, EachType>)
        with_type(type, [&]<class Own>() TANDEM_INLINE_BODY { dot_window_rows<Own>(type, p, lane); });
    else if constexpr (is_float_type<T>)
        dot_one_floats<T>(shared_dots(type, p, lane));
    else
        dot_one_blocks<T>(shared_dots(type, p, lane));
}

// Instance<T>::kernel for the type. Host code. Names of instances differ from file to file: GCC does not tell apart those of
// unnamed namespaces.
template <template <class> class Instance>
auto kernel_of(Type type) {
    switch (type) {
#define TANDEM_CASE(name, number) \
    case Type::name:              \
        return Instance<name>::kernel;
        TANDEM_QUANT_TYPES(TANDEM_CASE)
#undef TANDEM_CASE
    }
    __builtin_unreachable();
}

}  // namespace tandem::quant
