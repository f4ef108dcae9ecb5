// How the weights of a tile pass through shared memory; see tile_prompt.cuh.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "device/check.h"
#include "quant/row.h"
#include "quant/table_bytes.h"

namespace tandem::cuda {

constexpr int kTileRows = 128;    // input rows of a tile, at most; the fewer, the fewer products
constexpr int kSideColumns = 64;  // weight rows of one side of a tile
constexpr int kTileColumns = 2 * kSideColumns;
constexpr int kTileStep = 32;   // values of one step along a row
constexpr int kTileStages = 3;  // steps of input rows in shared memory
constexpr int kTileThreads = 128;

// One side of tiles: weight rows of one matrix. Raw bytes come in spans of one or several steps, two spans in shared memory.
struct SideShape {
    quant::Type type;
    int32_t span_values;
    int32_t span_bytes;
    int32_t pitch;        // bytes between the spans of two rows in shared memory: 16 times an odd number, against bank conflicts
    int32_t table_bytes;  // of the type's code book
    size_t row_bytes;
};

constexpr size_t kTileFixedBytes = kTileStages * kTileRows * kTileStep * 2 + 2 * kTileColumns * kTileStep * 2;

inline size_t side_shared_bytes(const SideShape& shape) {
    return 2 * kSideColumns * static_cast<size_t>(shape.pitch) + shape.table_bytes;
}
inline size_t tile_shared_bytes(const SideShape& first, const SideShape& second) {
    return kTileFixedBytes + side_shared_bytes(first) + side_shared_bytes(second);
}

// Matrices begin at a multiple of 16. `shared_limit`: bytes that a block may have. Where two such sides do not fit, the pitch is
// any multiple of 16: cards of 99 KiB read Q6_K with bank conflicts.
inline SideShape side_shape(quant::Type type, size_t row_bytes, size_t shared_limit) {
    constexpr int kUnit = 16;
    const int block = static_cast<int>(quant::block_values(type)), bytes = static_cast<int>(quant::block_bytes(type));
    const int span_values = block == 1 ? 128 / bytes : block < 256 ? 128 : 256;
    const int span_bytes = span_values / block * bytes;
    const int aligned = std::min(bytes & -bytes, kUnit);  // so is every block
    const int units = (span_bytes + kUnit - aligned + kUnit - 1) / kUnit;
    SideShape shape{type, span_values, span_bytes, kUnit * (units | 1), static_cast<int32_t>(quant::table_bytes(type)), row_bytes};
    if (tile_shared_bytes(shape, shape) > shared_limit) shape.pitch = kUnit * units;
    return shape;
}

// What a block of this thread's card may have.
inline size_t block_shared_limit() {
    int device = 0, limit = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    return static_cast<size_t>(limit);
}

}  // namespace tandem::cuda
