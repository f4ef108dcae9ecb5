#include "cuda_ops/attention_prompt.h"

#include "base/require.h"
#include "cuda_ops/attention_prompt_tile.cuh"
#include "device/launch.h"

namespace tandem::cuda {

namespace {

constexpr int kWarps = 4;
// Blocks that share a multiprocessor, by what their registers allow.
template <int head_dim>
constexpr int kBlocksPerMultiprocessor = head_dim <= 128 ? 3 : 2;
constexpr int kTileRows = 2 * kKvTile + kWarps * kRows;  // of halves in shared memory: keys, values and queries
constexpr float kLog2e = 1.44269504f;

// A warp's rows: kRows positions from `first` on (within the chunk) of one head; the heads that share keys lie side by side, so
// that the warps of a block go through the same tiles.
struct WarpRows {
    int head;
    int first;
    int num;  // 0: none

    __device__ static WarpRows of(int slot, int group, int kv_head, int num_rows) {
        const int first = slot / group * kRows;
        return {kv_head * group + slot % group, first, max(0, min(kRows, num_rows - first))};
    }
    // Tiles that its last row sees.
    __device__ int64_t num_tiles(int64_t position) const { return num == 0 ? 0 : (position + first + num - 1) / kKvTile + 1; }
};

// out / sum of the rows that exist.
template <int kDim>
__device__ __forceinline__ void store_rows(const AttentionPromptProblem& p, const WarpRows& rows, RunningSoftmax& state, int lane,
                                           const float (&out)[kDim / kColumns][4]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = state.sum[r];
        sum = __fadd_rn(sum, __shfl_xor_sync(kWholeWarp, sum, 1));
        sum = __fadd_rn(sum, __shfl_xor_sync(kWholeWarp, sum, 2));
        const float inverse = __fdiv_rn(1.0f, sum);
        const int row = lane / 4 + 8 * r;
        if (row >= rows.num) continue;
        float* to = p.out + (int64_t{rows.first + row} * p.query_heads + rows.head) * kDim + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < kDim / kColumns; n++)
            *reinterpret_cast<float2*>(to + n * kColumns) = {__fmul_rn(out[n][2 * r], inverse),
                                                             __fmul_rn(out[n][2 * r + 1], inverse)};
    }
}

// Tiles of int8 come into shared memory as they are and are widened there; the longest heads leave no room for that and are
// widened from where they lie.
template <int kDim, class Value>
constexpr int kStagedBytes = kHasScales<Value> && kDim <= 192 ? kv_tile_bytes(KvValues<Value>::kType, kDim) : 0;

// The tiles of one key/value head, on their way into shared memory.
template <int kDim, class Value>
struct HeadTiles {
    const Value* keys;
    const Value* values;
    int64_t end;    // positions that are written
    Value* staged;  // kStagedBytes in shared memory

    __device__ static HeadTiles of(const KvLayer& kv, int head, int64_t end, Value* staged) {
        const int64_t at = head * kv.num_tiles * tile_values<Value>(kDim);
        return {reinterpret_cast<const Value*>(kv.keys) + at, reinterpret_cast<const Value*>(kv.values) + at, end, staged};
    }
    __device__ __forceinline__ void start_keys(int64_t tile, __half* to) const {
        if constexpr (kHasScales<Value>) {
            stage(keys + tile * tile_values<Value>(kDim));
        } else {
            start_tile<kDim, kKvTile / kUnitHalves, false>(keys + tile * tile_values<Value>(kDim), 0, to);
        }
    }
    // A weight of zero times what was never written could be NaN: there are zeros instead.
    __device__ __forceinline__ void start_values(int64_t tile, __half* to) const {
        if constexpr (kHasScales<Value>) {
            stage(values + tile * tile_values<Value>(kDim));
        } else {
            start_tile<kKvTile, kDim / kUnitHalves, true>(values + tile * tile_values<Value>(kDim), num_written(tile), to);
        }
    }
    // Between the end of the copies that start_keys() (start_values()) began and the first look at them.
    __device__ __forceinline__ void take_keys(int64_t tile, __half* to) const {
        if constexpr (kHasScales<Value>) {
            widen_tile<kDim, kKvTile / kUnitHalves, true>(staged_or(keys + tile * tile_values<Value>(kDim)), 0, to);
            __syncthreads();
        }
    }
    __device__ __forceinline__ void take_values(int64_t tile, __half* to) const {
        if constexpr (kHasScales<Value>) {
            const Value* from = staged_or(values + tile * tile_values<Value>(kDim));
            widen_tile<kKvTile, kDim / kUnitHalves, false>(from, num_written(tile), to);
            __syncthreads();
        }
    }

  private:
    __device__ int num_written(int64_t tile) const {
        const int64_t left = end - tile * kKvTile;
        return static_cast<int>(left < kKvTile ? left : kKvTile);
    }
    __device__ __forceinline__ void stage(const Value* tile) const { start_copy(tile, kStagedBytes<kDim, Value>, staged); }
    __device__ const Value* staged_or(const Value* tile) const { return kStagedBytes<kDim, Value> > 0 ? staged : tile; }
};

// Waits for this thread's copies, then for all threads.
__device__ __forceinline__ void finish_copies() {
    device::copy_async_wait<0>();
    __syncthreads();
}

// All tiles for the rows of a warp. Values are copied while keys are scored, the next keys while values are summed.
template <int kDim, class Value>
__device__ __forceinline__ void attend_tiles(const HeadTiles<kDim, Value>& tiles, int64_t num_tiles, int64_t num_seen,
                                             int64_t first_position, float factor, int lane, __half* shared, const __half* queries,
                                             RunningSoftmax& softmax, float (&out)[kDim / kColumns][4]) {
    __half *keys = shared, *values = shared + kKvTile * kDim;
    for (int64_t tile = 0; tile < num_tiles; tile++) {
        const bool sees = tile < num_seen;
        float scores[kScoreBlocks][4] = {}, before[2];
        finish_copies();
        tiles.take_keys(tile, keys);
        tiles.start_values(tile, values);
        if (sees) {
            const auto ahead = static_cast<int>(tile * kKvTile - first_position);
            score_rows<kDim>(queries, keys, lane, scores);
            if (ahead + kKvTile > 1) mask_scores(ahead, lane, scores);
            advance_rows(factor, softmax, scores, before);
        }
        finish_copies();
        tiles.take_values(tile, values);
        if (tile + 1 < num_tiles) tiles.start_keys(tile + 1, keys);
        if (!sees) continue;
        scale_rows(before, out);
        mix_rows<kDim>(values, scores, lane, out);
    }
}

template <int kDim, class Value>
__global__ void __launch_bounds__(kWarps* kWarpLanes, kBlocksPerMultiprocessor<kDim>)
    attention_kernel(const AttentionPromptProblem p, const int64_t position, const int num_rows) {
    const int warp = static_cast<int>(threadIdx.x) / kWarpLanes, lane = static_cast<int>(threadIdx.x) % kWarpLanes;
    const int group = p.query_heads / p.kv.num_heads, kv_head = static_cast<int>(blockIdx.y);
    const int block = static_cast<int>(gridDim.x - 1 - blockIdx.x);  // late rows see most: they start first
    const WarpRows rows = WarpRows::of(block * kWarps + warp, group, kv_head, num_rows);
    int64_t num_tiles = 0;
    for (int w = 0; w < kWarps; w++) {
        const int64_t num = WarpRows::of(block * kWarps + w, group, kv_head, num_rows).num_tiles(position);
        num_tiles = num > num_tiles ? num : num_tiles;
    }
    __half* shared = reinterpret_cast<__half*>(device::dynamic_shared());
    __half* queries = shared + (2 * kKvTile + warp * kRows) * kDim;
    const int64_t query_at = (int64_t{rows.first} * p.query_heads + rows.head) * kDim;
    start_queries<kDim / kUnitHalves>(reinterpret_cast<const __half*>(p.query) + query_at, int64_t{p.query_heads} * kDim, rows.num,
                                      lane, queries);
    Value* staged = reinterpret_cast<Value*>(shared + kTileRows * kDim);
    const auto tiles = HeadTiles<kDim, Value>::of(p.kv, kv_head, position + num_rows, staged);
    tiles.start_keys(0, shared);
    RunningSoftmax softmax{{-INFINITY, -INFINITY}, {0.0f, 0.0f}};
    float out[kDim / kColumns][4] = {};
    attend_tiles<kDim>(tiles, num_tiles, rows.num_tiles(position), position + rows.first, __fmul_rn(p.scale, kLog2e), lane, shared,
                       queries, softmax, out);
    store_rows<kDim>(p, rows, softmax, lane, out);
}

struct Kernel {
    void (*function)(AttentionPromptProblem, int64_t, int);
    size_t shared_bytes;
};

template <class Value, int kDim>
Kernel instance() {
    return {attention_kernel<kDim, Value>, kTileRows * kDim * sizeof(__half) + kStagedBytes<kDim, Value>};
}

template <class Value>
Kernel kernel_of(int head_dim) {
    switch (head_dim) {
        case 64:
            return instance<Value, 64>();
        case 96:
            return instance<Value, 96>();
        case 128:
            return instance<Value, 128>();
        case 192:
            return instance<Value, 192>();
        case 256:
            return instance<Value, 256>();
        default:
            throw std::invalid_argument("heads of " + std::to_string(head_dim) +
                                        " values are not supported by the prompt's attention; 64, 96, 128, 192 and 256 are");
    }
}

Kernel kernel_of(const KvLayer& kv) {
    switch (kv.type) {
        case KvType::f16:
            return kernel_of<__half>(kv.head_dim);
        case KvType::f32:
            return kernel_of<float>(kv.head_dim);
        case KvType::int8:
            return kernel_of<int8_t>(kv.head_dim);
    }
    throw std::invalid_argument("the key/value cache has a type that is not known");
}

}  // namespace

void attention_prompt(const AttentionPromptProblem& p, int64_t position, int num_rows, cudaStream_t stream) {
    require(p.query_heads % p.kv.num_heads == 0, std::to_string(p.query_heads) + " query heads cannot share " +
                                                     std::to_string(p.kv.num_heads) + " key/value heads evenly");
    const Kernel kernel = kernel_of(p.kv);
    const int64_t slots = (num_rows + kRows - 1) / kRows * int64_t{p.query_heads / p.kv.num_heads};
    const dim3 grid(static_cast<unsigned>((slots + kWarps - 1) / kWarps), static_cast<unsigned>(p.kv.num_heads));
    device::launch({grid, kWarps * kWarpLanes, kernel.shared_bytes, stream}, kernel.function, p, position, num_rows);
}

}  // namespace tandem::cuda
