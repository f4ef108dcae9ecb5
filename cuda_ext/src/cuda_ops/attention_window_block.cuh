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
    int heads_shift;  // query q of a block is head q mod 2^heads_shift of row q >> heads_shift
    int chunk_tiles;
};

// Of one tile of a chunk and one query.
struct TileSoftmax {
    float most;    // the greatest score
    float before;  // factor of what was summed before the tile
    float sum;     // of the weights
};

// Offsets into a block's shared memory, in bytes; every part is 16-byte aligned.
struct WindowShared {
    size_t keys;        // tiles of the cache [chunk_tiles]
    size_t values;      // the same
    size_t query;       // float [num_queries, head_dim], normed and rotated; later the merged sums
    size_t scores;      // float [num_queries, chunk_tiles * kKvTile]; later factors [num_queries, 2, kMergeSpans]
    size_t turned;      // float [rows, head_dim]: new keys before they are rounded
    size_t new_keys;    // values and scales [rows]
    size_t new_values;  // the same
    size_t tiles;       // TileSoftmax [num_queries, kSpanTiles]
    size_t states;      // SoftmaxState [num_queries]
    size_t last;        // int: whether this block is its part's last
    size_t nbytes;

    __host__ __device__ static WindowShared of(int num_queries, int num_rows, int head_dim, int chunk_tiles, KvType type) {
        WindowShared at{};
        size_t used = 0;
        const auto take = [&used](size_t nbytes) {
            const size_t offset = used;
            used += (nbytes + 15) / 16 * 16;
            return offset;
        };
        const size_t tiles = size_t(chunk_tiles) * kv_tile_bytes(type, head_dim), floats = size_t(num_queries) * head_dim * 4;
        const size_t new_rows = size_t(num_rows) * kv_row_bytes(type, head_dim);
        at.keys = take(tiles);
        at.values = take(tiles);
        at.query = take(floats);
        at.scores = take(size_t(num_queries) * chunk_tiles * kKvTile * 4);
        at.turned = take(size_t(num_rows) * head_dim * 4);
        at.new_keys = take(new_rows);
        at.new_values = take(new_rows);
        at.tiles = take(size_t(num_queries) * kSpanTiles * sizeof(TileSoftmax));
        at.states = take(size_t(num_queries) * sizeof(SoftmaxState));
        at.last = take(sizeof(int));
        at.nbytes = used;
        return at;
    }
};
static_assert(2 * kMergeSpans <= kKvTile, "factors of the merge take the place of the scores of one tile");

// Positions are below 2^31. kDim: the length of a head, or 0 where it is known only at run time.
template <class Value, int kQueries, int kDim>
struct WindowBlock {
    int kv_head;
    int part;
    int first_head;  // among all query heads
    int num_heads;
    int num_rows;
    int heads_shift;
    int chunk_tiles;
    int warp, lane, num_warps;
    int position;  // of row 0
    int head_dim_at_run_time;
    Value* keys;
    Value* values;
    float* query;
    float* out;  // the place of `query`, once all scores are done
    float* scores;
    float* turned;
    Value* new_keys;
    Value* new_values;
    TileSoftmax* tiles;
    SoftmaxState* states;
    int* last;

    __device__ int head_dim() const { return head_length<kDim>(head_dim_at_run_time); }
    __device__ int tile_step() const { return tile_values<Value>(head_dim()); }
    __device__ int end() const { return position + num_rows; }
    __device__ int num_spans() const { return (end() + kSpan - 1) / kSpan; }
    __device__ int row_of(int q) const { return q >> heads_shift; }
    __device__ int head_of(int q) const { return first_head + (q & ((1 << heads_shift) - 1)); }
    __device__ bool exists(int q) const { return row_of(q) < num_rows && head_of(q) < first_head + num_heads; }
    // Positions of a tile that row r sees: 0..kKvTile.
    __device__ int seen(int row, int tile) const { return max(0, min(kKvTile, position + row + 1 - tile * kKvTile)); }
    __device__ bool sees_span(int row, int span) const { return span * kSpan <= position + row; }
    // Copies and row-wise work go round all threads.
    __device__ int thread() const { return warp * kWarpLanes + lane; }
    __device__ int num_threads() const { return num_warps * kWarpLanes; }
};

template <class Value, int kQueries, int kDim>
__device__ __forceinline__ void place_in_shared(WindowBlock<Value, kQueries, kDim>& block) {
    unsigned char* shared = device::dynamic_shared();
    const WindowShared at = WindowShared::of(kQueries, block.num_rows, block.head_dim(), block.chunk_tiles, KvValues<Value>::kType);
    block.keys = reinterpret_cast<Value*>(shared + at.keys);
    block.values = reinterpret_cast<Value*>(shared + at.values);
    block.query = reinterpret_cast<float*>(shared + at.query);
    block.out = block.query;
    block.scores = reinterpret_cast<float*>(shared + at.scores);
    block.turned = reinterpret_cast<float*>(shared + at.turned);
    block.new_keys = reinterpret_cast<Value*>(shared + at.new_keys);
    block.new_values = reinterpret_cast<Value*>(shared + at.new_values);
    block.tiles = reinterpret_cast<TileSoftmax*>(shared + at.tiles);
    block.states = reinterpret_cast<SoftmaxState*>(shared + at.states);
    block.last = reinterpret_cast<int*>(shared + at.last);
}

template <class Value, int kQueries, int kDim>
__device__ __forceinline__ WindowBlock<Value, kQueries, kDim> window_block(const WindowArguments& arguments) {
    const AttentionWindowProblem& p = arguments.problem;
    WindowBlock<Value, kQueries, kDim> block;
    const int group = p.query_heads / p.kv.num_heads, thread = static_cast<int>(threadIdx.x);
    block.kv_head = static_cast<int>(blockIdx.x) / arguments.num_parts;
    block.part = static_cast<int>(blockIdx.x) - block.kv_head * arguments.num_parts;
    const int first = block.part * arguments.part_heads;
    block.first_head = block.kv_head * group + first;
    block.num_heads = min(arguments.part_heads, group - first);
    block.num_rows = p.num_rows;
    block.heads_shift = arguments.heads_shift;
    block.chunk_tiles = arguments.chunk_tiles;
    block.warp = thread / kWarpLanes;
    block.lane = thread % kWarpLanes;
    block.num_warps = static_cast<int>(blockDim.x) / kWarpLanes;
    block.position = static_cast<int>(p.state->position);
    block.head_dim_at_run_time = p.kv.head_dim;
    place_in_shared(block);
    return block;
}

// The block's key/value head from tile `tile` on, as KvLayer::tile_at has it.
template <class Value, int kQueries, int kDim>
__device__ __forceinline__ int64_t tile_at(const WindowBlock<Value, kQueries, kDim>& block, const KvLayer& kv, int tile) {
    return (block.kv_head * kv.num_tiles + tile) * block.tile_step();
}

// The first position of a 16-byte unit of neighbouring tiles.
template <bool of_keys, class Value>
__device__ __forceinline__ int unit_place(int unit, int head_dim) {
    constexpr int kUnit = kCopyBytes / sizeof(Value), kKeyUnits = kKvTile / kUnit, kScaleUnit = kCopyBytes / sizeof(__half);
    const int value_units = head_dim / kUnit;
    if constexpr (kHasScales<Value>) {
        const int tile_units = tile_values<Value>(head_dim) / kUnit, tile = unit / tile_units, within = unit - tile * tile_units,
                  scales = within - kKvTile * value_units;
        if (scales >= 0) return tile * kKvTile + scales % (kKvTile / kScaleUnit) * kScaleUnit;
        return tile * kKvTile + (of_keys ? within % kKeyUnits * kUnit : within / value_units);
    }
    return of_keys ? unit / (kKvTile * value_units) * kKvTile + unit % kKeyUnits * kUnit : unit / value_units;
}

// Starts the copy of the old keys (or values) of a chunk: of tiles `first`.. those 16-byte units that hold a position before
// `position`. One group per call, empty or not.
template <bool of_keys, class Value, int kQueries, int kDim>
__device__ __forceinline__ void start_chunk(const WindowBlock<Value, kQueries, kDim>& block, const KvLayer& kv, int first) {
    constexpr int kUnit = kCopyBytes / sizeof(Value);
    const int tile_units = block.tile_step() / kUnit;
    const int old = block.position - first * kKvTile, tiles = min(block.chunk_tiles, (old + kKvTile - 1) / kKvTile);
    const auto* from = reinterpret_cast<const Value*>(of_keys ? kv.keys : kv.values) + tile_at(block, kv, first);
    Value* to = of_keys ? block.keys : block.values;
#pragma unroll 4
    for (int unit = block.thread(); unit < tiles * tile_units; unit += block.num_threads()) {
        if (unit_place<of_keys, Value>(unit, block.head_dim()) < old) device::copy_async16(to + unit * kUnit, from + unit * kUnit);
    }
    device::copy_async_commit();
}

// Where the values and scales of a new key or value go.
template <class Value>
struct RowPlace {
    Value* values;
    __half* scales;
    int step;  // from a value to the next
    int scale_step;
};

// Position `place` of `tiles`, of the cache or in shared memory.
template <class Value, class Block>
__device__ __forceinline__ RowPlace<Value> place_in_tiles(const Block& block, Value* tiles, bool is_key, int place) {
    const int dim = block.head_dim(), within = place % kKvTile;
    Value* tile = tiles + place / kKvTile * block.tile_step();
    return {tile + (is_key ? within : within * dim), scales_behind(tile, kKvTile * dim) + within, is_key ? kKvTile : 1, kKvTile};
}

// What one warp makes of the window's rows: a query or, behind those, a key normed and rotated, or, behind those, a value; keys
// and values are rounded as the cache holds them.
template <class Value, int kQueries, int kDim>
struct WindowRows {
    const WindowBlock<Value, kQueries, kDim>& block;
    const AttentionWindowProblem& p;
    int first_tile;  // of the first chunk
    bool in_place;   // the only row goes at once to its place in the first chunk, and by one block of the head into the cache

    __device__ bool is_query(int item) const { return item < kQueries; }
    __device__ bool is_key(int item) const { return !is_query(item) && item < kQueries + block.num_rows; }
    __device__ int row_of(int item) const {
        return is_query(item) ? block.row_of(item) : is_key(item) ? item - kQueries : item - kQueries - block.num_rows;
    }

    // May come before wait_prerequisites().
    __device__ Turn<kDim> fetch(int item) const {
        if (!is_query(item) && !is_key(item)) return {};
        const int row = min(row_of(item), block.num_rows - 1), dim = block.head_dim();
        return fetch_turn<kDim>(is_query(item) ? p.query_gamma : p.key_gamma, p.angles + int64_t{block.position + row} * (dim / 2),
                                dim, block.lane);
    }

    __device__ void make(int item, const Turn<kDim>& turn) const {
        const int row = row_of(item), dim = block.head_dim();
        if (is_query(item)) {
            if (!block.exists(item)) return;
            turn_head<kDim>(p.query + (row * p.query_heads + block.head_of(item)) * dim, turn, p.eps, dim, block.lane,
                            block.query + item * dim);
            return;
        }
        const int64_t at = int64_t{row * p.kv.num_heads + block.kv_head} * dim;
        if (is_key(item)) turn_head<kDim>(p.key + at, turn, p.eps, dim, block.lane, block.turned + row * dim);
        const RowPlace<Value> to = in_place ? place_in_chunk(is_key(item)) : row_to(is_key(item), row);
        const RowPlace<Value> cache = in_place && block.part == 0 ? place_in_cache(is_key(item)) : RowPlace<Value>{};
        narrow_row<Value>(
            dim, block.lane, [&](int i) { return is_key(item) ? block.turned[row * dim + i] : __ldcg(p.value + at + i); },
            [&](int i, Value x) {
                to.values[i * to.step] = x;
                if (cache.values) cache.values[i * cache.step] = x;
            },
            [&](int group, __half scale) {
                to.scales[group * to.scale_step] = scale;
                if (cache.values) cache.scales[group * cache.scale_step] = scale;
            });
    }

    // Among the window's rows.
    __device__ RowPlace<Value> row_to(bool key, int row) const {
        Value* out = (key ? block.new_keys : block.new_values) + row * row_values<Value>(block.head_dim());
        return {out, scales_behind(out, block.head_dim()), 1, 1};
    }
    __device__ RowPlace<Value> place_in_chunk(bool key) const {
        return place_in_tiles(block, key ? block.keys : block.values, key, block.position - first_tile * kKvTile);
    }
    __device__ RowPlace<Value> place_in_cache(bool key) const {
        Value* tiles = reinterpret_cast<Value*>(key ? p.kv.keys : p.kv.values) + tile_at(block, p.kv, first_tile);
        return place_in_tiles(block, tiles, key, block.position - first_tile * kKvTile);
    }
};

// The block's queries, and the window's own keys and values too where `with_keys`; `first`: fetched for the warp's first item. A
// barrier must stand behind it.
template <class Value, int kQueries, int kDim>
__device__ __forceinline__ void make_rows(const WindowRows<Value, kQueries, kDim>& rows, bool with_keys, const Turn<kDim>& first) {
    const WindowBlock<Value, kQueries, kDim>& block = rows.block;
    const int num = kQueries + (with_keys ? 2 * block.num_rows : 0);
    if (block.warp < num) rows.make(block.warp, first);
#pragma unroll 1
    for (int item = block.warp + block.num_warps; item < num; item += block.num_warps) rows.make(item, rows.fetch(item));
}

// Puts the window's rows that belong into the chunk where they belong: `keys` and `values` begin with tile `first_tile`, of the
// cache or in shared memory.
template <class Value, int kQueries, int kDim>
__device__ __forceinline__ void put_rows(const WindowBlock<Value, kQueries, kDim>& block, int first_tile, Value* keys,
                                         Value* values) {
    const int dim = block.head_dim(), row_step = row_values<Value>(dim);
#pragma unroll 1
    for (int row = 0; row < block.num_rows; row++) {
        const int place = block.position + row - first_tile * kKvTile;
        if (place < 0 || place >= block.chunk_tiles * kKvTile) continue;
        const RowPlace<Value> key_to = place_in_tiles(block, keys, true, place),
                              value_to = place_in_tiles(block, values, false, place);
        const Value *key = block.new_keys + row * row_step, *value = block.new_values + row * row_step;
#pragma unroll 1
        for (int i = block.thread(); i < dim; i += block.num_threads()) {
            key_to.values[i * key_to.step] = key[i];
            value_to.values[i * value_to.step] = value[i];
        }
        if constexpr (kHasScales<Value>) {
            for (int group = block.thread(); group < kv_groups(dim); group += block.num_threads()) {
                key_to.scales[group * key_to.scale_step] = scales_behind(key, dim)[group];
                value_to.scales[group * value_to.scale_step] = scales_behind(value, dim)[group];
            }
        }
    }
}

}  // namespace tandem::cuda
