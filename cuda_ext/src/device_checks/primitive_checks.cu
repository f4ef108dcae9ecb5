#include "device_checks/primitive_checks.h"

#include "device/launch.h"
#include "device/primitives.cuh"

namespace tandem::device_checks {

using device::launch;
using device::LaunchShape;

namespace {

constexpr int kLanes = 32;

__global__ void multiply_s8_kernel(const int8_t* a, const int8_t* b, int32_t* d) {
    const int lane = threadIdx.x, group = lane / 4, place = lane % 4;
    uint32_t ra[4] = {}, rb[2] = {};
    for (int i = 0; i < 4; i++) {
        for (int r = 0; r < 4; r++) {
            const int row = group + r % 2 * 8, column = r / 2 * 16 + place * 4 + i;
            ra[r] |= static_cast<uint32_t>(static_cast<uint8_t>(a[row * 32 + column])) << (8 * i);
        }
        for (int r = 0; r < 2; r++)
            rb[r] |= static_cast<uint32_t>(static_cast<uint8_t>(b[(r * 16 + place * 4 + i) * 8 + group])) << (8 * i);
    }
    int32_t sum[4] = {1, 1, 1, 1};
    device::mma_s8(sum, ra, rb);
    for (int i = 0; i < 4; i++) d[(group + i / 2 * 8) * 8 + place * 2 + i % 2] = sum[i] - 1;
}

__global__ void multiply_f16_kernel(const uint16_t* a, const uint16_t* b, float* d) {
    __shared__ __align__(16) uint16_t tiles[2][16][16];
    const int lane = threadIdx.x;
    for (int i = lane; i < 256; i += kLanes) {
        tiles[0][i / 16][i % 16] = a[i];
        tiles[1][i / 16][i % 16] = b[i];
    }
    __syncwarp();
    const int row = lane % 16, half = lane / 16 * 8;  // matrices: upper left, lower left, upper right, lower right
    uint32_t ra[4], rb[4];
    device::ldmatrix_x4(ra, &tiles[0][row][half]);
    device::ldmatrix_x4_transposed(rb, &tiles[1][row][half]);
    for (int n = 0; n < 2; n++) {
        const uint32_t columns[2] = {rb[2 * n], rb[2 * n + 1]};
        float sum[4] = {};
        device::mma_f16(sum, ra, columns);
        for (int i = 0; i < 4; i++) d[(lane / 4 + i / 2 * 8) * 16 + n * 8 + lane % 4 * 2 + i % 2] = sum[i];
    }
}

__global__ void warp_operations_kernel(const int32_t* values, int32_t* out) {
    const int lane = threadIdx.x, value = values[lane];
    int32_t results[kWarpResults];
    results[0] = __shfl_xor_sync(~0u, value, 5);
    results[1] = __shfl_sync(~0u, value, 3, 8);
    results[2] = __shfl_down_sync(~0u, value, 3);
    results[3] = __shfl_up_sync(~0u, value, 3);
    results[4] = __reduce_add_sync(~0u, value);
    results[5] = __reduce_min_sync(~0u, value);
    results[6] = __reduce_max_sync(~0u, value);
    results[7] = static_cast<int32_t>(__ballot_sync(~0u, lane % 2));
    for (int i = 0; i < kWarpResults; i++) out[i * kLanes + lane] = results[i];
}

constexpr int kWarps = 4, kStages = 2;

__global__ void copy_staged_kernel(const uint8_t* rows, size_t row_bytes, int num_rows, uint8_t* out, uint32_t stage_bytes) {
    __shared__ device::StagedCopy copies[kWarps][kStages];
    if (threadIdx.x < kWarps * kStages) copies[threadIdx.x / kStages][threadIdx.x % kStages].init();
    __syncthreads();
    const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
    unsigned char* stages = device::dynamic_shared() + warp * kStages * stage_bytes;
    auto start = [&](int row, int stage) {
        const device::AlignedSpan span = device::aligned_span(rows + row * row_bytes, row_bytes);
        const uint32_t first = span.nbytes / 32 * 16;  // in two parts
        const auto* source = static_cast<const uint8_t*>(span.start);
        if (first > 0) copies[warp][stage].start(stages + stage * stage_bytes, source, first, lane);
        copies[warp][stage].start(stages + stage * stage_bytes + first, source + first, span.nbytes - first, lane);
    };
    for (int s = 0; s < kStages; s++)
        if (warp + s * kWarps < num_rows) start(warp + s * kWarps, s);
    for (int row = warp, round = 0; row < num_rows; row += kWarps, round++) {
        const int stage = round % kStages;
        copies[warp][stage].wait(lane, round / kStages % 2);
        const uint32_t offset = device::aligned_span(rows + row * row_bytes, row_bytes).offset;
        for (size_t i = lane; i < row_bytes; i += kLanes) out[row * row_bytes + i] = stages[stage * stage_bytes + offset + i];
        __syncwarp();
        if (row + kStages * kWarps < num_rows) start(row + kStages * kWarps, stage);
    }
}

// Each thread moves a column of 16 bytes, one row ahead of the one it writes.
__global__ void copy_grouped_kernel(const uint8_t* rows, size_t row_bytes, int num_rows, uint8_t* out) {
    __shared__ uint4 stages[2][kLanes];
    const size_t column = (blockIdx.x * kLanes + threadIdx.x) * 16;
    if (column >= row_bytes) return;
    for (int row = 0; row <= num_rows; row++) {
        if (row < num_rows) device::copy_async16(&stages[row % 2][threadIdx.x], rows + row * row_bytes + column);
        device::copy_async_commit();
        if (row == 0) continue;
        device::copy_async_wait<1>();
        *reinterpret_cast<uint4*>(out + (row - 1) * row_bytes + column) = stages[(row - 1) % 2][threadIdx.x];
    }
}

__global__ void chain_first_kernel(int32_t value, int32_t* between, int num) {
    device::wait_prerequisites();
    device::launch_dependents();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < num) between[i] = value + i;
}

__global__ void chain_second_kernel(const int32_t* between, int32_t* out, int num) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    device::wait_prerequisites();
    device::launch_dependents();
    if (i < num) out[i] = 2 * between[(i + 1) % num];
}

__global__ void count_run_kernel(unsigned* ticket, int32_t* counter) {
    __shared__ bool last;
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(ticket, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (last && threadIdx.x == 0) {
        *ticket = 0;
        *counter += 1;
    }
}

__global__ void ask_host_kernel(uint32_t value, uint32_t* posted, const uint32_t* answered, const uint32_t* answer, uint32_t* out) {
    __shared__ uint32_t got;
    if (threadIdx.x == 0) {
        device::store_release_system(posted, value);
        while (device::load_acquire_system(answered) != value) device::spin_pause();
        got = *static_cast<const volatile uint32_t*>(answer);
    }
    __syncthreads();
    if (threadIdx.x == blockDim.x - 1) *out = got;
}

__global__ void mistake_kernel(Mistake mistake, int32_t* out) {
    const int lane = threadIdx.x % kLanes;
    int value = lane;
    if (mistake == Mistake::lane_missing && lane != 7) value = __shfl_xor_sync(~0u, value, 1);
    if (mistake == Mistake::different_operations)
        value = lane < 16 ? __shfl_xor_sync(~0u, value, 1) : __reduce_add_sync(~0u, value);
    if (mistake == Mistake::barrier_missing) {
        if (threadIdx.x < 40)
            __syncthreads();
        else
            while (true) value = __shfl_xor_sync(~0u, value, 1);
    }
    if (mistake == Mistake::shared_overrun) device::dynamic_shared()[64 + threadIdx.x] = 1;
    if (mistake == Mistake::copy_not_awaited) {
        __shared__ device::StagedCopy copy;
        if (threadIdx.x == 0) copy.init();
        __syncthreads();
        if (threadIdx.x < kLanes) copy.start(device::dynamic_shared(), out, 32, lane);
    }
    out[threadIdx.x] = value;
}

}  // namespace

void multiply_s8(const int8_t* a, const int8_t* b, int32_t* d, cudaStream_t stream) {
    launch(LaunchShape{1, kLanes, 0, stream}, multiply_s8_kernel, a, b, d);
}

void multiply_f16(const uint16_t* a, const uint16_t* b, float* d, cudaStream_t stream) {
    launch(LaunchShape{1, kLanes, 0, stream}, multiply_f16_kernel, a, b, d);
}

void warp_operations(const int32_t* values, int32_t* out, cudaStream_t stream) {
    launch(LaunchShape{1, kLanes, 0, stream}, warp_operations_kernel, values, out);
}

void copy_staged(const uint8_t* rows, size_t row_bytes, int num_rows, uint8_t* out, cudaStream_t stream) {
    const auto stage_bytes = static_cast<uint32_t>((row_bytes + 15) / 16 * 16 + 16);
    launch(LaunchShape{1, kWarps * kLanes, size_t{kWarps} * kStages * stage_bytes, stream}, copy_staged_kernel, rows, row_bytes,
           num_rows, out, stage_bytes);
}

void copy_grouped(const uint8_t* rows, size_t row_bytes, int num_rows, uint8_t* out, cudaStream_t stream) {
    const auto num_blocks = static_cast<unsigned>((row_bytes / 16 + kLanes - 1) / kLanes);
    launch(LaunchShape{num_blocks, kLanes, 0, stream}, copy_grouped_kernel, rows, row_bytes, num_rows, out);
}

void chain(int32_t value, int32_t* between, int32_t* out, int num, cudaStream_t stream) {
    const LaunchShape shape{static_cast<unsigned>((num + 127) / 128), 128, 0, stream, true};
    launch(shape, chain_first_kernel, value, between, num);
    launch(shape, chain_second_kernel, between, out, num);
}

void count_run(unsigned* ticket, int32_t* counter, cudaStream_t stream) {
    launch(LaunchShape{5, 64, 0, stream}, count_run_kernel, ticket, counter);
}

void ask_host(uint32_t value, uint32_t* posted, const uint32_t* answered, const uint32_t* answer, uint32_t* out,
              cudaStream_t stream) {
    launch(LaunchShape{1, 64, 0, stream}, ask_host_kernel, value, posted, answered, answer, out);
}

void make_mistake(Mistake mistake, int32_t* out, cudaStream_t stream) {
    launch(LaunchShape{1, 64, 64, stream, mistake == Mistake::no_prerequisites}, mistake_kernel, mistake, out);
}

}  // namespace tandem::device_checks
