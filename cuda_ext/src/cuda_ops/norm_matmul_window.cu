#include "cuda_ops/norm_matmul_window.h"

#include "cuda_ops/norm_row.cuh"
#include "cuda_ops/norm_window.h"
#include "cuda_ops/products.cuh"
#include "device/launch.h"

namespace tandem::cuda {

namespace {

__device__ __forceinline__ NormRow norm_of(const NormMatmulWindowProblem& p, const ProductsPlan& plan) {
    unsigned char* shared = device::dynamic_shared();
    NormRow row{};
    row.x = p.x;
    row.gamma = p.gamma;
    row.width = p.products.product[0].weights.columns;
    row.eps = p.eps;
    row.scratch = reinterpret_cast<float*>(shared + plan.scratch);
    row.inverse = reinterpret_cast<float*>(shared + plan.inverse);
    if (plan.wants_groups) row.groups = reinterpret_cast<quant::SharedGroup*>(shared + plan.groups);
    if (plan.wants_values) row.scratch = row.values = reinterpret_cast<float*>(shared + plan.values);
    return row;
}

template <class T, int num_blocks = 2>
__global__ void __launch_bounds__(kWindowThreads, num_blocks)
    norm_matmul_kernel(const __grid_constant__ NormMatmulWindowProblem p, const __grid_constant__ ProductsPlan plan) {
    unsigned char* shared = device::dynamic_shared();
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const ProductItems<T> items(p.products, plan, 1, warp);
    StageRing ring(shared + plan.rings, plan.ring_plan, warp, lane);
    const bool fetches = warp < plan.ring_plan.num_warps;
    if (fetches) {
        items.take_share(lane);
        ring.fetch(items, lane);
    }
    load_tables(p.products, plan, thread, kWindowThreads);
    const GammaAhead gamma = fetch_gamma(p.gamma, p.products.product[0].weights.columns, thread);
    device::wait_prerequisites();
    device::launch_dependents();
    norm_row(norm_of(p, plan), gamma, thread, kWindowThreads, [](int) {}, [] {});
    if (fetches) items.run(ring, lane);
}

template <class T>
struct NormMatmulInstance {
    static constexpr auto kernel = norm_matmul_kernel<T>;
};

}  // namespace

void norm_matmul_window(const NormMatmulWindowProblem& problem, const CardShape& card, bool dependent, cudaStream_t stream) {
    const bool is_one = problem.num_rows == 1;
    const ProductsPlan plan = plan_products(problem.products, problem.num_rows, is_one, card);
    if (is_one) {
        device::launch({dim3(static_cast<unsigned>(plan.num_blocks)), dim3(kWindowThreads), plan.shared_bytes, stream, dependent},
                       plan.is_long ? norm_matmul_kernel<quant::EachType, 1> : kernel_for<NormMatmulInstance>(problem.products),
                       problem, plan);
        return;
    }
    quant::ActGroup* groups = plan.wants_groups ? problem.groups : nullptr;
    float* values = plan.wants_values ? problem.values : nullptr;
    const int32_t width = problem.products.product[0].weights.columns;
    norm_window({problem.num_rows, problem.x, problem.gamma, width, problem.eps, groups, values, nullptr, 0}, dependent, stream);
    matmul_window({problem.num_rows, groups, values, problem.products}, card, true, stream);
}

}  // namespace tandem::cuda
