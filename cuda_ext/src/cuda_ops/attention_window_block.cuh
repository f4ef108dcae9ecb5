// What a block of attention_window works on, its shared memory, and how keys and values come into it.
#pragma once
#include "cuda_ops/attention_window.h"
#include "cuda_ops/rotary.cuh"
#include "ops/activations.h"
#include "quant/arithmetic.h"

namespace tandem::cuda {

constexpr int kSpanTiles = kSpan / kKvTile;
constexpr int kWarpsPerTile = 2;  // of a chunk
constexpr int kMergeSpans = 32;   // spans whose factors lie in shared memory at once
constexpr int kCopyBytes = 16;

// Kernel arguments.
struct WindowArguments {
    AttentionWindowProblem problem;
    int part_heads;
    int num_parts;
    int chunk_tiles;
};

// Offsets into a block's shared memory, in bytes; every part is 16-byte aligned.
struct WindowShared {
    size_t keys;        // Value [chunk_tiles, head_dim, kKvTile]
    size_t values;      // Value [chunk_tiles, kKvTile, head_dim]
    size_t query;       // float [num_queries, head_dim], normed and rotated
    size_t out;         // float [num_queries, head_dim]
    size_t scores;      // float [num_queries, chunk_tiles * kKvTile]; later factors [num_queries, 2, kMergeSpans]
    size_t new_keys;    // Value [rows, head_dim]
    size_t new_values;  // Value [rows, head_dim]
    size_t before;      // float [num_queries, kSpanTiles]: factor of what was summed before a tile
    size_t states;      // SoftmaxState [num_queries]
    size_t turned;      // float [warps, head_dim]: a key under way
    size_t last;        // int: whether this block is its part's last
    size_t nbytes;

    __host__ __device__ static WindowShared of(int num_queries, int num_rows, int head_dim, int chunk_tiles, int value_bytes) {
        WindowShared at{};
        size_t used = 0;
        const auto take = [&used](size_t nbytes) {
            const size_t offset = used;
            used += (nbytes + 15) / 16 * 16;
            return offset;
        };
        const size_t tiles = size_t(chunk_tiles) * kKvTile * head_dim * value_bytes, floats = size_t(num_queries) * head_dim * 4;
        at.keys = take(tiles);
        at.values = take(tiles);
        at.query = take(floats);
        at.out = take(floats);
        at.scores = take(size_t(num_queries) * chunk_tiles * kKvTile * 4);
        at.new_keys = take(size_t(num_rows) * head_dim * value_bytes);
        at.new_values = take(size_t(num_rows) * head_dim * value_bytes);
        at.before = take(size_t(num_queries) * kSpanTiles * 4);
        at.states = take(size_t(num_queries) * sizeof(SoftmaxState));
        at.turned = take(size_t(kWarpsPerTile * chunk_tiles) * head_dim * 4);
        at.last = take(sizeof(int));
        at.nbytes = used;
        return at;
    }
};
static_assert(2 * kMergeSpans <= kKvTile, "factors of the merge take the place of the scores of one tile");

// Query q of a block is head q % num_heads of row q / num_heads.
template <class Value>
struct WindowBlock {
    int kv_head;
    int part;
    int first_head;  // among all query heads
    int num_heads;
    int num_queries;
    int num_rows;
    int head_dim;
    int chunk_tiles;
    int warp, lane, num_warps;
    int64_t position;  // of row 0
    Value* keys;
    Value* values;
    float* query;
    float* out;
    float* scores;
    Value* new_keys;
    Value* new_values;
    float* before;
    SoftmaxState* states;
    float* turned;
    int* last;

    __device__ int64_t end() const { return position + num_rows; }
    __device__ int64_t num_spans() const { return (end() + kSpan - 1) / kSpan; }
    __device__ int row_of(int q) const { return q / num_heads; }
    __device__ int head_of(int q) const { return first_head + q % num_heads; }
    // Positions of a tile that row r sees: 0..kKvTile.
    __device__ int seen(int row, int64_t tile) const {
        const int64_t num = position + row + 1 - tile * kKvTile;
        return static_cast<int>(num < 0 ? 0 : num < kKvTile ? num : kKvTile);
    }
    __device__ bool sees_span(int row, int64_t span) const { return span * kSpan <= position + row; }
};

template <class Value, int kQueries>
__device__ __forceinline__ WindowBlock<Value> window_block(const WindowArguments& arguments) {
    const AttentionWindowProblem& p = arguments.problem;
    unsigned char* shared = device::dynamic_shared();
    const WindowShared at = WindowShared::of(kQueries, p.num_rows, p.kv.head_dim, arguments.chunk_tiles, sizeof(Value));
    WindowBlock<Value> block;
    const int group = p.query_heads / p.kv.num_heads, thread = static_cast<int>(threadIdx.x);
    block.kv_head = static_cast<int>(blockIdx.x) / arguments.num_parts;
    block.part = static_cast<int>(blockIdx.x) % arguments.num_parts;
    const int first = block.part * arguments.part_heads;
    block.first_head = block.kv_head * group + first;
    block.num_heads = min(arguments.part_heads, group - first);
    block.num_rows = p.num_rows;
    block.num_queries = block.num_heads * p.num_rows;
    block.head_dim = p.kv.head_dim;
    block.chunk_tiles = arguments.chunk_tiles;
    block.warp = thread / kWarpLanes;
    block.lane = thread % kWarpLanes;
    block.num_warps = static_cast<int>(blockDim.x) / kWarpLanes;
    block.position = p.state->position;
    block.keys = reinterpret_cast<Value*>(shared + at.keys);
    block.values = reinterpret_cast<Value*>(shared + at.values);
    block.query = reinterpret_cast<float*>(shared + at.query);
    block.out = reinterpret_cast<float*>(shared + at.out);
    block.scores = reinterpret_cast<float*>(shared + at.scores);
    block.new_keys = reinterpret_cast<Value*>(shared + at.new_keys);
    block.new_values = reinterpret_cast<Value*>(shared + at.new_values);
    block.before = reinterpret_cast<float*>(shared + at.before);
    block.states = reinterpret_cast<SoftmaxState*>(shared + at.states);
    block.turned = reinterpret_cast<float*>(shared + at.turned);
    block.last = reinterpret_cast<int*>(shared + at.last);
    return block;
}

// Index of the first value of a tile, as KvLayer::tile_at has it.
__device__ __forceinline__ int64_t tile_at(const KvLayer& kv, int head, int64_t tile) {
    return (head * kv.num_tiles + tile) * kKvTile * kv.head_dim;
}

// Starts the copy of the old keys (or values) of a chunk: of tiles `first`.. those 16-byte units that hold a position before
// `position`. One group per call, empty or not.
template <bool of_keys, class Value>
__device__ __forceinline__ void start_chunk(const WindowBlock<Value>& block, const KvLayer& kv, int64_t first) {
    constexpr int kUnit = kCopyBytes / sizeof(Value), kKeyUnits = kKvTile / kUnit;
    const int value_units = block.head_dim / kUnit, units = kKvTile * value_units;
    const auto* memory = reinterpret_cast<const Value*>(of_keys ? kv.keys : kv.values);
    Value* to = of_keys ? block.keys : block.values;
    for (int t = 0; t < block.chunk_tiles; t++) {
        const int64_t old = block.position - (first + t) * kKvTile;
        if (old <= 0) break;
        const Value* from = memory + tile_at(kv, block.kv_head, first + t);
        for (int unit = static_cast<int>(threadIdx.x); unit < units; unit += static_cast<int>(blockDim.x)) {
            const int place = of_keys ? unit % kKeyUnits * kUnit : unit / value_units;
            if (place < old) device::copy_async16(to + t * units * kUnit + unit * kUnit, from + unit * kUnit);
        }
    }
    device::copy_async_commit();
}

// The window's own keys and values, normed, rotated and rounded: those of its rows in the block's spans are left in shared
// memory. Rows go round the warps.
template <class Value>
__device__ __forceinline__ void make_new_rows(const WindowBlock<Value>& block, const AttentionWindowProblem& p) {
    using Values = KvValues<Value>;
    const int dim = block.head_dim;
    float* turned = block.turned + block.warp * dim;
    for (int row = block.num_warps - 1 - block.warp; row < block.num_rows; row += block.num_warps) {
        const int64_t from = (int64_t{row} * p.kv.num_heads + block.kv_head) * dim;
        turn_head(p.key + from, p.key_gamma, p.eps, p.angles + (block.position + row) * (dim / 2), dim, block.lane, turned);
        for (int i = block.lane; i < dim; i += kWarpLanes) {
            block.new_keys[row * dim + i] = Values::narrow(turned[i]);
            block.new_values[row * dim + i] = Values::narrow(__ldcg(p.value + from + i));
        }
        __syncwarp();
    }
}

// Writes the new rows of a chunk's tiles into the cache.
template <class Value>
__device__ __forceinline__ void append_rows(const WindowBlock<Value>& block, const KvLayer& kv, int64_t first_tile) {
    const int dim = block.head_dim;
    for (int row = 0; row < block.num_rows; row++) {
        const int64_t tile = (block.position + row) / kKvTile;
        if (tile < first_tile || tile >= first_tile + block.chunk_tiles) continue;
        const int place = static_cast<int>((block.position + row) % kKvTile);
        Value* keys = reinterpret_cast<Value*>(kv.keys) + tile_at(kv, block.kv_head, tile) + place;
        Value* values = reinterpret_cast<Value*>(kv.values) + tile_at(kv, block.kv_head, tile) + place * dim;
        for (int i = static_cast<int>(threadIdx.x); i < dim; i += static_cast<int>(blockDim.x)) {
            keys[i * kKvTile] = block.new_keys[row * dim + i];
            values[i] = block.new_values[row * dim + i];
        }
    }
}

// Adds the new rows to the tiles in shared memory. Their copies are complete; a barrier must follow.
template <bool of_keys, class Value>
__device__ __forceinline__ void splice_rows(const WindowBlock<Value>& block, int64_t first_tile) {
    const int dim = block.head_dim;
    for (int row = 0; row < block.num_rows; row++) {
        const int64_t tile = (block.position + row) / kKvTile - first_tile;
        if (tile < 0 || tile >= block.chunk_tiles) continue;
        const int place = static_cast<int>((block.position + row) % kKvTile), at = static_cast<int>(tile) * kKvTile * dim;
        for (int i = static_cast<int>(threadIdx.x); i < dim; i += static_cast<int>(blockDim.x)) {
            if (of_keys) {
                block.keys[at + i * kKvTile + place] = block.new_keys[row * dim + i];
            } else {
                block.values[at + place * dim + i] = block.new_values[row * dim + i];
            }
        }
    }
}

}  // namespace tandem::cuda
