#include "cuda_ops/embed.h"

#include "device/launch.h"
#include "device/primitives.cuh"
#include "quant/dequantise.h"
#include "quant/types.h"

namespace tandem::cuda {

namespace {

constexpr int kThreads = 64;

template <class T>
__device__ __forceinline__ void embed_blocks(const uint8_t* row, int columns, float* out) {
    constexpr int per_block = T::block_values / quant::kBlock;
    const auto* blocks = reinterpret_cast<const typename T::Block*>(row);
    const int i = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
    if (i < columns / quant::kBlock) quant::dequantise_block<T>(blocks[i / per_block], i % per_block, out + quant::kBlock * i);
}

template <class T>
__device__ __forceinline__ void embed_floats(const uint8_t* row, int columns, float* out) {
    const auto* values = reinterpret_cast<const typename T::Block*>(row);
    const int first = static_cast<int>(blockIdx.x) * kThreads * quant::kBlock;
    for (int i = first + static_cast<int>(threadIdx.x); i < min(columns, first + kThreads * quant::kBlock); i += kThreads)
        out[i] = T::value(values[i]);
}

// Block (x, y): 32 * kThreads values of row y.
__global__ void embed_kernel(const __grid_constant__ EmbedProblem p) {
    device::wait_prerequisites();
    device::launch_dependents();
    const uint8_t* row = p.table.data + static_cast<size_t>(p.tokens[blockIdx.y]) * p.table.row_bytes;
    float* out = p.out + static_cast<size_t>(blockIdx.y) * p.table.columns;
    switch (p.table.type) {
#define TANDEM_CASE(name, number) \
    case quant::Type::name:       \
        return embed_floats<quant::name>(row, p.table.columns, out);
        TANDEM_FLOAT_TYPES(TANDEM_CASE)
#undef TANDEM_CASE
#define TANDEM_CASE(name, number) \
    case quant::Type::name:       \
        return embed_blocks<quant::name>(row, p.table.columns, out);
        TANDEM_BLOCK_TYPES(TANDEM_CASE)
#undef TANDEM_CASE
    }
}

}  // namespace

void embed(const EmbedProblem& problem, bool dependent, cudaStream_t stream) {
    constexpr int values = kThreads * quant::kBlock;  // of a block
    const dim3 grid(static_cast<unsigned>((problem.table.columns + values - 1) / values), static_cast<unsigned>(problem.num_rows));
    device::launch({grid, dim3(kThreads), 0, stream, dependent}, embed_kernel, problem);
}

}  // namespace tandem::cuda
