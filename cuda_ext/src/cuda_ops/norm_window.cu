#include "cuda_ops/norm_window.h"

#include "cuda_ops/norm_row.cuh"
#include "device/dynamic_shared.cuh"
#include "device/launch.h"
#include "ops/activations.h"

namespace tandem::cuda {

namespace {

constexpr int kThreads = 512;

// A block has a row. Its shared memory: the groups, then floats.
__global__ void __launch_bounds__(kThreads) norm_kernel(const __grid_constant__ NormWindowProblem p) {
    __shared__ float inverse;
    const int thread = threadIdx.x, row = blockIdx.x, num_groups = (p.width + quant::kSuper - 1) / quant::kSuper;
    auto* groups = reinterpret_cast<quant::SharedGroup*>(device::dynamic_shared());
    NormRow norm{};
    norm.x = p.x + static_cast<int64_t>(row) * p.width;
    norm.gamma = p.gamma;
    norm.width = p.width;
    norm.eps = p.eps;
    norm.inverse = &inverse;
    norm.groups = p.groups ? groups : nullptr;
    norm.scratch = reinterpret_cast<float*>(groups + (p.groups ? num_groups : 0));
    norm.values = p.values ? norm.scratch : nullptr;
    const GammaAhead gamma = fetch_gamma(p.gamma, p.width, thread);
    device::wait_prerequisites();
    device::launch_dependents();
    norm_row(norm, gamma, thread, kThreads, [](int) {}, [] {});
    if (p.state && thread == 0) tell_inverse(p.state, p.layer, row, inverse);
    if (p.groups) quant::store_groups(norm.groups, p.groups + static_cast<int64_t>(row) * num_groups, num_groups, thread, kThreads);
    for (int i = thread; p.values && i < p.width; i += kThreads) p.values[static_cast<int64_t>(row) * p.width + i] = norm.values[i];
}

}  // namespace

void norm_window(const NormWindowProblem& p, bool dependent, cudaStream_t stream) {
    const size_t groups_bytes = p.groups ? groups_of(p.width) * sizeof(quant::SharedGroup) : 0;
    const auto blocks = static_cast<unsigned>(p.num_rows);
    device::launch({dim3(blocks), dim3(kThreads), groups_bytes + p.width * sizeof(float), stream, dependent}, norm_kernel, p);
}

}  // namespace tandem::cuda
