#include "cuda_ops/attention_window_kernel.cuh"

namespace tandem::cuda {

WindowKernel int8_window_kernel(int head_dim, int num_queries) {
    return window_kernel<int8_t>(head_dim, num_queries);
}

}  // namespace tandem::cuda
