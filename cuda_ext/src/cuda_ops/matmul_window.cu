#include "cuda_ops/matmul_window.h"

#include <algorithm>

#include "cuda_ops/products.cuh"
#include "device/launch.h"

namespace tandem::cuda {

namespace {

__device__ __forceinline__ void copy_units(void* shared, const void* global, size_t nbytes, int thread) {
    const auto* from = static_cast<const uint4*>(global);
    auto* to = static_cast<uint4*>(shared);
#pragma unroll 4
    for (int i = thread; i < static_cast<int>(nbytes / sizeof(uint4)); i += kWindowThreads) to[i] = __ldcg(from + i);
}

template <class T>
__global__ void __launch_bounds__(kWindowThreads, kBlocksOf<T>)
    matmul_kernel(const __grid_constant__ MatmulWindowProblem p, const __grid_constant__ ProductsPlan plan) {
    unsigned char* shared = device::dynamic_shared();
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const ProductItems<T> items(p.products, plan, p.num_rows, warp);
    StageRing ring(shared + plan.rings, plan.ring_plan, warp, lane);
    const bool fetches = warp < plan.ring_plan.num_warps;
    if (fetches) {
        items.take_share(lane);
        ring.fetch(items, lane);
    }
    load_tables(p.products, plan, thread, kWindowThreads);
    const bool routes = p.products.router.weights != nullptr;
    if (routes) fetch_router(p.products, plan, thread, kWindowThreads);
    device::wait_prerequisites();
    device::launch_dependents();
    const int columns = p.products.product[0].weights.columns;
    if (plan.wants_groups)
        quant::load_groups(p.groups, reinterpret_cast<quant::SharedGroup*>(shared + plan.groups),
                           p.num_rows * ((columns + quant::kSuper - 1) / quant::kSuper), thread, kWindowThreads);
    if (plan.wants_values)
        copy_units(shared + plan.values, p.values, static_cast<size_t>(p.num_rows) * columns * sizeof(float), thread);
    __syncthreads();
    if (fetches) items.run(ring, lane);
    if (!routes) return;
    device::copy_async_wait<0>();
    __syncthreads();
    add_router_sums(p.products, plan, thread, kWindowThreads);
}

template <class T>
struct MatmulInstance {
    static constexpr auto kernel = matmul_kernel<T>;
};

}  // namespace

void matmul_window(const MatmulWindowProblem& problem, const CardShape& card, bool dependent, cudaStream_t stream) {
    const ProductsPlan plan = plan_products(problem.products, problem.num_rows, false, card);
    const int64_t columns = problem.products.product[0].weights.columns, groups = (columns + quant::kSuper - 1) / quant::kSuper;
    const auto kernel = plan.launch_rows > 1 ? matmul_kernel<quant::AnyType> : kernel_for<MatmulInstance>(problem.products);
    for (int first = 0; first < problem.num_rows; first += plan.launch_rows) {
        MatmulWindowProblem part = problem;
        part.num_rows = std::min(plan.launch_rows, problem.num_rows - first);
        if (part.groups) part.groups += first * groups;
        if (part.values) part.values += first * columns;
        part.products = rows_from(problem.products, first);
        device::launch({dim3(static_cast<unsigned>(plan.num_blocks)), dim3(kWindowThreads), plan.shared_bytes, stream, dependent},
                       kernel, part, plan);
    }
}

}  // namespace tandem::cuda
