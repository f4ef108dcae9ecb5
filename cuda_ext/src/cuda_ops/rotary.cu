#include "cuda_ops/rotary.h"

#include "base/require.h"
#include "cuda_ops/rotary.cuh"
#include "device/launch.h"

namespace tandem::cuda {

namespace {

constexpr int kWarps = 8;
constexpr int kTilePadding = 2;  // values behind each dimension of a tile: neighbouring dimensions lie in different banks

// A warp per (row, query head).
__global__ void turn_queries(const RotaryPromptProblem p, const int64_t position, const int num_rows) {
    const int warp = static_cast<int>(threadIdx.x) / kWarpLanes, lane = static_cast<int>(threadIdx.x) % kWarpLanes;
    const int dim = p.kv.head_dim;
    const int64_t item = int64_t{blockIdx.x} * kWarps + warp;
    if (item >= int64_t{num_rows} * p.query_heads) return;
    float* turned = reinterpret_cast<float*>(device::dynamic_shared()) + warp * dim;
    const int64_t row = item / p.query_heads;
    const Turn<0> turn = fetch_turn<0>(p.query_gamma, p.angles + (position + row) * (dim / 2), dim, lane);
    turn_head<0>(p.query + item * dim, turn, p.eps, dim, lane, turned);
    for (int i = lane; i < dim; i += kWarpLanes) {
        if (p.turned) p.turned[item * dim + i] = turned[i];
        if (p.half_turned) reinterpret_cast<__half*>(p.half_turned)[item * dim + i] = __float2half_rn(turned[i]);
    }
}

// Those of a chunk's positions that lie in one tile.
struct TileRows {
    int64_t tile;
    int begin, end;  // places within the tile
    int64_t row;     // of the first place, within the chunk
};

__device__ __forceinline__ TileRows tile_rows(int64_t position, int num_rows, int index) {
    TileRows rows{};
    rows.tile = position / kKvTile + index;
    const int64_t first = rows.tile * kKvTile, end = position + num_rows;
    rows.begin = static_cast<int>(position > first ? position - first : 0);
    rows.end = static_cast<int>(end - first < kKvTile ? end - first : kKvTile);
    rows.row = first + rows.begin - position;
    return rows;
}

// Keys are turned one position per warp, gathered by dimension in shared memory, and written position by position.
template <class Value>
__device__ __forceinline__ void append_keys(const RotaryPromptProblem& p, const TileRows& rows, int64_t position, int head,
                                            Value* out) {
    constexpr int kStride = kKvTile + kTilePadding;
    const int warp = static_cast<int>(threadIdx.x) / kWarpLanes, lane = static_cast<int>(threadIdx.x) % kWarpLanes;
    const int dim = p.kv.head_dim;
    float* turned = reinterpret_cast<float*>(device::dynamic_shared()) + warp * dim;
    Value* tile = reinterpret_cast<Value*>(device::dynamic_shared() + kWarps * dim * sizeof(float));
    for (int place = rows.begin + warp; place < rows.end; place += kWarps) {
        const int64_t row = rows.row + place - rows.begin;
        const Turn<0> turn = fetch_turn<0>(p.key_gamma, p.angles + (position + row) * (dim / 2), dim, lane);
        turn_head<0>(p.key + (row * p.kv.num_heads + head) * dim, turn, p.eps, dim, lane, turned);
        narrow_row<Value>(
            dim, lane, [&](int i) { return turned[i]; }, [&](int i, Value x) { tile[i * kStride + place] = x; },
            [&](int group, __half scale) { scales_behind(out, kKvTile * dim)[group * kKvTile + place] = scale; });
        __syncwarp();
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < dim * kKvTile; i += static_cast<int>(blockDim.x)) {
        const int place = i % kKvTile;
        if (place >= rows.begin && place < rows.end) out[i] = tile[i / kKvTile * kStride + place];
    }
}

// A warp per position.
template <class Value>
__device__ __forceinline__ void append_values(const RotaryPromptProblem& p, const TileRows& rows, int head, Value* out) {
    const int warp = static_cast<int>(threadIdx.x) / kWarpLanes, lane = static_cast<int>(threadIdx.x) % kWarpLanes;
    const int dim = p.kv.head_dim;
    for (int place = rows.begin + warp; place < rows.end; place += kWarps) {
        const float* from = p.value + ((rows.row + place - rows.begin) * p.kv.num_heads + head) * dim;
        narrow_row<Value>(
            dim, lane, [&](int i) { return from[i]; }, [&](int i, Value x) { out[place * dim + i] = x; },
            [&](int group, __half scale) { scales_behind(out, kKvTile * dim)[group * kKvTile + place] = scale; });
    }
}

// A block per (tile, key/value head).
template <class Value>
__global__ void append_rows(const RotaryPromptProblem p, const int64_t position, const int num_rows) {
    const int head = static_cast<int>(blockIdx.y);
    const TileRows rows = tile_rows(position, num_rows, static_cast<int>(blockIdx.x));
    const int64_t at = (head * p.kv.num_tiles + rows.tile) * tile_values<Value>(p.kv.head_dim);
    append_keys(p, rows, position, head, reinterpret_cast<Value*>(p.kv.keys) + at);
    append_values(p, rows, head, reinterpret_cast<Value*>(p.kv.values) + at);
}

template <class Value>
void append(const RotaryPromptProblem& p, int64_t position, int num_rows, cudaStream_t stream) {
    const int64_t tiles = (position + num_rows - 1) / kKvTile - position / kKvTile + 1;
    const size_t tile_bytes = sizeof(Value) * static_cast<size_t>(p.kv.head_dim) * (kKvTile + kTilePadding);
    const size_t shared_bytes = kWarps * sizeof(float) * static_cast<size_t>(p.kv.head_dim) + tile_bytes;
    const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(p.kv.num_heads));
    device::launch({grid, kWarps * kWarpLanes, shared_bytes, stream}, append_rows<Value>, p, position, num_rows);
}

}  // namespace

void rotary(const RotaryPromptProblem& p, int64_t position, int num_rows, cudaStream_t stream) {
    const int dim = p.kv.head_dim;
    require(dim % kWarpLanes == 0 && dim >= kWarpLanes && dim <= kMaxHeadDim,
            "heads of " + std::to_string(dim) + " values are not supported; multiples of 32 up to " + std::to_string(kMaxHeadDim) +
                " are");
    const int64_t queries = int64_t{num_rows} * p.query_heads;
    device::launch({static_cast<unsigned>((queries + kWarps - 1) / kWarps), kWarps * kWarpLanes,
                    kWarps * sizeof(float) * static_cast<size_t>(dim), stream},
                   turn_queries, p, position, num_rows);
    switch (p.kv.type) {
        case KvType::f16:
            return append<__half>(p, position, num_rows, stream);
        case KvType::f32:
            return append<float>(p, position, num_rows, stream);
        case KvType::int8:
            return append<int8_t>(p, position, num_rows, stream);
    }
}

}  // namespace tandem::cuda
