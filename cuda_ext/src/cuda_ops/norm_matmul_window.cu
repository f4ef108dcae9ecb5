#include "cuda_ops/norm_matmul_window.h"

#include <algorithm>

#include "cuda_ops/norm_rows.cuh"
#include "cuda_ops/products.cuh"
#include "device/launch.h"

namespace tandem::cuda {

namespace {

template <class T>
__device__ __forceinline__ void norm_window(const NormMatmulWindowProblem& p, const ProductsPlan& plan, const GammaAhead& gamma,
                                            int thread) {
    unsigned char* shared = device::dynamic_shared();
    const int width = p.products.product[0].weights.columns, groups = (width + quant::kSuper - 1) / quant::kSuper;
    NormRows rows{};
    rows.gamma = p.gamma;
    rows.width = width;
    rows.eps = p.eps;
    rows.scratch = reinterpret_cast<float*>(shared + plan.scratch);
    rows.inverse = reinterpret_cast<float*>(shared + plan.inverse);
    for (int first = 0; first < p.num_rows; first += plan.norm_rows) {
        rows.x = p.x + first * width;
        rows.num_rows = min(plan.norm_rows, p.num_rows - first);
        if (plan.wants_groups) rows.groups = reinterpret_cast<quant::SharedGroup*>(shared + plan.groups) + first * groups;
        if (plan.wants_values) rows.scratch = rows.values = reinterpret_cast<float*>(shared + plan.values) + first * width;
        if constexpr (quant::kOneRow<T>)
            norm_one_row(rows, gamma, thread, kOneRowThreads, [](int) {}, [] {});
        else
            norm_rows(rows, thread, kWindowThreads);
    }
}

template <class T>
__global__ void __launch_bounds__(kThreadsOf<T>, 2)
    norm_matmul_kernel(const __grid_constant__ NormMatmulWindowProblem p, const __grid_constant__ ProductsPlan plan) {
    unsigned char* shared = device::dynamic_shared();
    constexpr int num_threads = kThreadsOf<T>;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const ProductItems<T> items(p.products, plan, p.num_rows, warp);
    StageRing ring(shared + plan.rings, plan.ring_plan, warp, lane);
    const bool fetches = warp < plan.ring_plan.num_warps;
    if (fetches) ring.fetch(items, lane);
    load_tables(p.products, plan, thread, num_threads);
    GammaAhead gamma{};
    if constexpr (quant::kOneRow<T>) gamma = fetch_gamma(p.gamma, p.products.product[0].weights.columns, thread);
    device::wait_prerequisites();
    device::launch_dependents();
    norm_window<T>(p, plan, gamma, thread);
    if (fetches) items.run(ring, lane);
}

template <class T>
struct NormMatmulInstance {
    static constexpr auto kernel = norm_matmul_kernel<T>;
};

}  // namespace

void norm_matmul_window(const NormMatmulWindowProblem& problem, const CardShape& card, bool dependent, cudaStream_t stream) {
    const ProductsPlan plan = plan_products(problem.products, problem.num_rows, true, card);
    const int64_t columns = problem.products.product[0].weights.columns;
    const auto kernel = kernel_for<NormMatmulInstance>(problem.products, plan.launch_rows);
    for (int first = 0; first < problem.num_rows; first += plan.launch_rows) {
        NormMatmulWindowProblem part = problem;
        part.num_rows = std::min(plan.launch_rows, problem.num_rows - first);
        part.x += first * columns;
        part.products = rows_from(problem.products, first);
        device::launch({dim3(static_cast<unsigned>(plan.num_blocks)), dim3(window_threads(plan.launch_rows)), plan.shared_bytes,
                        stream, dependent},
                       kernel, part, plan);
    }
}

}  // namespace tandem::cuda
