#include "cuda_ops/matmul_prompt.h"

#include <algorithm>

#include "base/require.h"
#include "cuda_ops/tile_prompt.cuh"
#include "device/launch.h"

namespace tandem::cuda {

namespace {

struct Part {
    SideShape shape;
    const uint8_t* data;
    float* out;
    const float* residual;
    uint32_t side_bytes;  // shared memory of one side
    int num_columns;      // weight rows
    int num_tiles;
};

struct Parts {
    HalfRows x;
    int num_rows;
    Part parts[kMaxPromptParts];
};

// Which part and which tile of its columns a block has.
struct Place {
    int part, first_column;
};

__device__ __forceinline__ Place place_of(const Parts& p, int tile) {
    int part = 0;
    while (tile >= p.parts[part].num_tiles) tile -= p.parts[part++].num_tiles;
    return {part, tile * kTileColumns};
}

__device__ __forceinline__ TileInputs inputs_of(const Parts& p, int first_row, int thread) {
    TileInputs inputs{p.x.width, min(kTileRows, p.num_rows - first_row), {}};
#pragma unroll
    for (int f = 0; f < kRowGroups; f++)
        inputs.next[f] = input_halves(p.x, first_row + input_row(f, inputs.num_rows, thread), thread);
    return inputs;
}

__device__ __forceinline__ void write_pair(const Part& part, size_t at, float2 value) {
    if (part.residual) {
        const float2 residual = *reinterpret_cast<const float2*>(part.residual + at);
        value = {quant::add(residual.x, value.x), quant::add(residual.y, value.y)};
    }
    *reinterpret_cast<float2*>(part.out + at) = value;
}

__global__ void __launch_bounds__(kTileThreads, 2) matmul_kernel(const __grid_constant__ Parts p) {
    const Place place = place_of(p, blockIdx.x);
    const Part& part = p.parts[place.part];
    const int first_row = blockIdx.y * kTileRows, thread = threadIdx.x;
    // A last tile may have no second side: it repeats the last row.
    const int column = min(place.first_column + thread / kSideColumns * kSideColumns, part.num_columns - 1);
    const TileSide side{part.data + column * part.shape.row_bytes, min(kSideColumns, part.num_columns - column)};
    const TileInputs inputs = inputs_of(p, first_row, thread);
    TileProducts products = {};
    TileWorker worker(inputs, part.shape, side, thread < kSideColumns ? 0 : part.side_bytes, thread);
    worker.multiply(products);
    worker.each_row([&](int row, int f, int half) {
        const float scale = quant::mul(p.x.scale[first_row + row], quant::kHalfInverse);
        const size_t begin = static_cast<size_t>(first_row + row) * part.num_columns;
#pragma unroll
        for (int j = 0; j < 2 * kSideFragments; j++) {
            const int at = place.first_column + j / kSideFragments * kSideColumns + worker.side_column(j);
            const float* value = products[f][j] + 2 * half;
            if (at < part.num_columns) write_pair(part, begin + at, {quant::mul(value[0], scale), quant::mul(value[1], scale)});
        }
    });
}

void check(const MatmulPromptProblem& problem) {
    require(problem.num_parts >= 1 && problem.num_parts <= kMaxPromptParts,
            "a prompt's product takes 1 to 3 matrices, but got " + std::to_string(problem.num_parts));
    require(problem.x.width % kTileStep == 0,
            "rows of " + std::to_string(problem.x.width) + " values are not whole steps of " + std::to_string(kTileStep));
    for (int i = 0; i < problem.num_parts; i++) {
        const DeviceMatrix& weights = problem.parts[i].weights;
        require(weights.columns == problem.x.width && weights.row_bytes == quant::row_bytes(weights.type, weights.columns) &&
                    weights.rows % 8 == 0,
                "a matrix of " + std::to_string(weights.rows) + " by " + std::to_string(weights.columns) +
                    " does not go with rows of " + std::to_string(problem.x.width) + " values, or its rows are no multiple of 8");
    }
}

}  // namespace

void matmul_prompt(const MatmulPromptProblem& problem, int num_rows, cudaStream_t stream) {
    check(problem);
    if (num_rows == 0) return;
    Parts parts{problem.x, num_rows, {}};
    int num_tiles = 0;
    size_t shared_bytes = 0;
    const size_t shared_limit = block_shared_limit();
    for (int i = 0; i < problem.num_parts; i++) {
        const DeviceMatrix& weights = problem.parts[i].weights;
        const SideShape shape = side_shape(weights.type, weights.row_bytes, shared_limit);
        parts.parts[i] = {shape,
                          weights.data,
                          problem.parts[i].out,
                          problem.parts[i].residual,
                          static_cast<uint32_t>(side_shared_bytes(shape)),
                          weights.rows,
                          (weights.rows + kTileColumns - 1) / kTileColumns};
        num_tiles += parts.parts[i].num_tiles;
        shared_bytes = std::max(shared_bytes, tile_shared_bytes(shape, shape));
    }
    const dim3 grid(num_tiles, (num_rows + kTileRows - 1) / kTileRows);
    device::launch({grid, dim3(kTileThreads), shared_bytes, stream}, matmul_kernel, parts);
}

}  // namespace tandem::cuda
