#include "cuda_ops/experts_prompt.h"

#include "base/require.h"
#include "cuda_ops/halve_row.cuh"
#include "cuda_ops/tile_prompt.cuh"
#include "device/launch.h"

namespace tandem::cuda {

namespace {

// The pairs of one row of blocks.
struct TilePairs {
    const uint8_t* blob;
    int first;  // in the order of RoutedPrompt::order
    int count;  // 0: none
};

__device__ __forceinline__ TilePairs pairs_of(const ExpertList& list, int tile) {
    if (tile >= *list.num_tiles) return {};
    const RowTile rows = list.tiles[tile];
    const ExpertRows expert = list.experts[rows.index];
    return {expert.blob, expert.first + rows.first, min(kTileRows, expert.count - rows.first)};
}

// ---- gate and up ----

struct GateUp {
    SideShape shape[2];  // of gate and of up
    size_t offset[2];
    uint32_t gate_bytes;  // shared memory of the first side
    int width;
    HalfRows x;
    const int32_t* order;
    int top_k;
    float* products;
};

__device__ __forceinline__ TileInputs inputs_of(const GateUp& p, const TilePairs& pairs, int thread) {
    TileInputs inputs{p.x.width, pairs.count, {}};
#pragma unroll
    for (int f = 0; f < kRowGroups; f++)
        inputs.next[f] = input_halves(p.x, p.order[pairs.first + input_row(f, pairs.count, thread)] / p.top_k, thread);
    return inputs;
}

__device__ __forceinline__ float2 gated(const float* gate, const float* up, float scale) {
    return {quant::swiglu_value(quant::mul(gate[0], scale), quant::mul(up[0], scale)),
            quant::swiglu_value(quant::mul(gate[1], scale), quant::mul(up[1], scale))};
}

__global__ void __launch_bounds__(kTileThreads, 2) gate_up_kernel(const __grid_constant__ GateUp p, ExpertList list) {
    const TilePairs pairs = pairs_of(list, blockIdx.y);
    if (pairs.count == 0) return;
    const int thread = threadIdx.x, which = thread / kSideColumns, first_column = blockIdx.x * kSideColumns;
    const SideShape& shape = p.shape[which];
    const TileSide side{pairs.blob + p.offset[which] + first_column * shape.row_bytes, min(kSideColumns, p.width - first_column)};
    const TileInputs inputs = inputs_of(p, pairs, thread);
    TileProducts products = {};
    TileWorker worker(inputs, shape, side, which ? p.gate_bytes : 0, thread);
    worker.multiply(products);
    worker.each_row([&](int row, int f, int half) {
        const int place = pairs.first + row;
        const float scale = quant::mul(p.x.scale[p.order[place] / p.top_k], quant::kHalfInverse);
        float* out = p.products + static_cast<size_t>(place) * p.width;
#pragma unroll
        for (int j = 0; j < kSideFragments; j++) {
            const int column = first_column + worker.side_column(j);
            const float *gate = products[f][j] + 2 * half, *up = products[f][j + kSideFragments] + 2 * half;
            if (column < p.width) *reinterpret_cast<float2*>(out + column) = gated(gate, up, scale);
        }
    });
}

// ---- their rows to half precision ----

constexpr int kHalveWarps = 4;

__global__ void __launch_bounds__(32 * kHalveWarps) halve_pairs_kernel(const float* products, HalfRows halves, ExpertList list) {
    const TilePairs pairs = pairs_of(list, blockIdx.y);
    const int row = blockIdx.x * kHalveWarps + threadIdx.x / 32;
    if (row >= pairs.count) return;
    const int place = pairs.first + row;
    const size_t at = static_cast<size_t>(place) * halves.width;
    halve_row(products + at, halves.values + at, halves.scale + place, halves.width, threadIdx.x % 32);
}

// ---- down ----

struct Down {
    SideShape shape;
    size_t offset;
    uint32_t side_bytes;
    int num_columns;
    HalfRows x;
    float* rows;
};

__device__ __forceinline__ TileInputs inputs_of(const Down& p, const TilePairs& pairs, int thread) {
    TileInputs inputs{p.x.width, pairs.count, {}};
#pragma unroll
    for (int f = 0; f < kRowGroups; f++)
        inputs.next[f] = input_halves(p.x, pairs.first + input_row(f, pairs.count, thread), thread);
    return inputs;
}

__global__ void __launch_bounds__(kTileThreads, 2) down_kernel(const __grid_constant__ Down p, ExpertList list) {
    const TilePairs pairs = pairs_of(list, blockIdx.y);
    if (pairs.count == 0) return;
    const int thread = threadIdx.x, which = thread / kSideColumns, first_column = blockIdx.x * kTileColumns;
    // A last tile may have no second side: it repeats the last row.
    const int side_column = min(first_column + which * kSideColumns, p.num_columns - 1);
    const TileSide side{pairs.blob + p.offset + side_column * p.shape.row_bytes, min(kSideColumns, p.num_columns - side_column)};
    const TileInputs inputs = inputs_of(p, pairs, thread);
    TileProducts products = {};
    TileWorker worker(inputs, p.shape, side, which ? p.side_bytes : 0, thread);
    worker.multiply(products);
    worker.each_row([&](int row, int f, int half) {
        const float scale = quant::mul(p.x.scale[pairs.first + row], quant::kHalfInverse);
        float* out = p.rows + static_cast<size_t>(pairs.first + row) * p.num_columns;
#pragma unroll
        for (int j = 0; j < 2 * kSideFragments; j++) {
            const int column = first_column + j / kSideFragments * kSideColumns + worker.side_column(j);
            const float* value = products[f][j] + 2 * half;
            if (column < p.num_columns)
                *reinterpret_cast<float2*>(out + column) = {quant::mul(value[0], scale), quant::mul(value[1], scale)};
        }
    });
}

// ---- combination: a block has a row ----

constexpr int kCombineThreads = 256;

__global__ void __launch_bounds__(kCombineThreads)
    combine_kernel(RoutedPrompt routed, const float* rows, float* hidden, int width) {
    const int row = blockIdx.x;
    const size_t first_pair = static_cast<size_t>(row) * routed.top_k;
    for (int at = 4 * threadIdx.x; at < width; at += 4 * kCombineThreads) {
        float4 sum = {};
#pragma unroll 4
        for (int k = 0; k < routed.top_k; k++) {
            const float weight = routed.weights[first_pair + k];
            const float4 y =
                *reinterpret_cast<const float4*>(rows + static_cast<size_t>(routed.places[first_pair + k]) * width + at);
            sum = {quant::fma(weight, y.x, sum.x), quant::fma(weight, y.y, sum.y), quant::fma(weight, y.z, sum.z),
                   quant::fma(weight, y.w, sum.w)};
        }
        auto* out = reinterpret_cast<float4*>(hidden + static_cast<size_t>(row) * width + at);
        const float4 old = *out;
        *out = {quant::add(old.x, sum.x), quant::add(old.y, sum.y), quant::add(old.z, sum.z), quant::add(old.w, sum.w)};
    }
}

void check(const ExpertsPromptProblem& p) {
    const int hidden = p.x.width, width = p.halves.width;
    const auto is = [](const PromptMatrix& matrix, int rows, int columns) {
        return matrix.rows == rows && matrix.columns == columns && rows % 8 == 0 && columns % kTileStep == 0;
    };
    require(is(p.gate, width, hidden) && is(p.up, width, hidden) && is(p.down, hidden, width),
            "experts of width " + std::to_string(width) + " over " + std::to_string(hidden) +
                " values: their matrices have other sizes, or these are no multiples of 32");
}

}  // namespace

void experts_gate_up_prompt(const ExpertsPromptProblem& problem, const ExpertList& list, int max_tiles, cudaStream_t stream) {
    check(problem);
    if (max_tiles == 0) return;
    const size_t shared_limit = block_shared_limit();
    const SideShape gate = side_shape(problem.gate.type, problem.gate.row_bytes, shared_limit);
    const SideShape up = side_shape(problem.up.type, problem.up.row_bytes, shared_limit);
    const GateUp p{{gate, up},
                   {problem.gate.offset, problem.up.offset},
                   static_cast<uint32_t>(side_shared_bytes(gate)),
                   problem.gate.rows,
                   problem.x,
                   problem.routed.order,
                   problem.routed.top_k,
                   problem.products};
    const dim3 tiles((p.width + kSideColumns - 1) / kSideColumns, max_tiles), rows(kTileRows / kHalveWarps, max_tiles);
    device::launch({tiles, dim3(kTileThreads), tile_shared_bytes(gate, up), stream}, gate_up_kernel, p, list);
    device::launch({rows, dim3(32 * kHalveWarps), 0, stream}, halve_pairs_kernel, problem.products, problem.halves, list);
}

void experts_down_prompt(const ExpertsPromptProblem& problem, const ExpertList& list, int max_tiles, cudaStream_t stream) {
    check(problem);
    if (max_tiles == 0) return;
    const SideShape shape = side_shape(problem.down.type, problem.down.row_bytes, block_shared_limit());
    const Down p{shape,          problem.down.offset, static_cast<uint32_t>(side_shared_bytes(shape)), problem.down.rows,
                 problem.halves, problem.expert_rows};
    const dim3 tiles((p.num_columns + kTileColumns - 1) / kTileColumns, max_tiles);
    device::launch({tiles, dim3(kTileThreads), tile_shared_bytes(shape, shape), stream}, down_kernel, p, list);
}

void experts_combine_prompt(const ExpertsPromptProblem& problem, int num_rows, cudaStream_t stream) {
    if (num_rows == 0) return;
    device::launch({dim3(num_rows), dim3(kCombineThreads), 0, stream}, combine_kernel, problem.routed, problem.expert_rows,
                   problem.hidden, problem.down.rows);
}

}  // namespace tandem::cuda
