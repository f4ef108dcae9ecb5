#include "cuda_ops/norm_prompt.h"

#include "cuda_ops/halve_row.cuh"
#include "device/launch.h"
#include "device/primitives.cuh"

namespace tandem::cuda {

namespace {

constexpr int kWarps = 4;  // of a block; a warp has one row

struct RowFacts {
    float inverse;  // 1 / rms
    uint32_t amax;  // bits of the largest |x * gamma|
};

// Lane j has chain j of 32, then the tree 16, 8, 4, 2, 1.
__device__ RowFacts row_facts(const float* x, const NormPromptProblem& p, int lane) {
    float sum = 0.0f;
    uint32_t amax = 0;
#pragma unroll 8
    for (int i = lane; i < p.out.width; i += 32) {
        const float value = x[i];
        sum = quant::add(sum, quant::mul(value, value));
        amax = max(amax, quant::float_bits(quant::mul(value, __ldg(p.gamma + i))) & 0x7fffffff);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum = quant::add(sum, __shfl_xor_sync(~0u, sum, step));
    const float mean = quant::div(sum, static_cast<float>(p.out.width));
    return {quant::div(1.0f, __fsqrt_rn(quant::add(mean, p.eps))), __reduce_max_sync(~0u, amax)};
}

__global__ void __launch_bounds__(32 * kWarps) norm_kernel(NormPromptProblem p, int num_rows) {
    const int row = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32, width = p.out.width;
    if (row >= num_rows) return;
    const float* x = p.x + static_cast<size_t>(row) * width;
    const RowFacts facts = row_facts(x, p, lane);
    // Rounding is monotonous: the largest product has the largest normed value.
    const float largest = quant::mul(quant::bits_float(facts.amax), facts.inverse);
    const HalfScale scales = half_scale(quant::float_bits(largest) & 0x7fffffff);
    if (lane == 0) p.out.scale[row] = scales.scale;
    if (lane == 0 && p.inverse) p.inverse[row] = facts.inverse;
    uint16_t* halves = p.out.values + static_cast<size_t>(row) * width;
#pragma unroll 8
    for (int i = lane; i < width; i += 32) {
        const float value = quant::mul(quant::mul(x[i], __ldg(p.gamma + i)), facts.inverse);
        halves[i] = scales.inverse == 0.0f ? 0 : half_bits(quant::mul(value, scales.inverse));
    }
}

__global__ void __launch_bounds__(32 * kWarps) halve_kernel(HalvePromptProblem p, int num_rows) {
    const int row = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= num_rows) return;
    const size_t at = static_cast<size_t>(row) * p.out.width;
    halve_row(p.x + at, p.out.values + at, p.out.scale + row, p.out.width, lane);
}

device::LaunchShape rows_shape(int num_rows, cudaStream_t stream) {
    return {dim3((num_rows + kWarps - 1) / kWarps), dim3(32 * kWarps), 0, stream};
}

}  // namespace

void norm_prompt(const NormPromptProblem& problem, int num_rows, cudaStream_t stream) {
    device::launch(rows_shape(num_rows, stream), norm_kernel, problem, num_rows);
}

void halve_prompt(const HalvePromptProblem& problem, int num_rows, cudaStream_t stream) {
    device::launch(rows_shape(num_rows, stream), halve_kernel, problem, num_rows);
}

}  // namespace tandem::cuda
