// Weight rows in shared memory by input rows in shared memory: the canonical dot products (docs/arithmetic.md), a warp at a time.
//
// The caller, once per block and type, before the first dot product and followed by a block barrier:
//     load_table(type, table, thread, num_threads)    reads global memory that no kernel writes: best before wait_prerequisites()
// and then, for any number of staged rows per warp:
//     dot_rows(type, {...}, lane)
//
// dot_rows calls one function per type that is compiled once, in quant/rows_*.cu, for at most kDotRegisters registers a
// thread: kernels that call it have at most 512 threads a block. Kernels stay the same for all types.
#pragma once
#include <cuda_runtime.h>

#include "quant/row.h"
#include "quant/table_bytes.h"

namespace tandem::quant {

constexpr int kMaxInputs = 8;
constexpr uint32_t kAllInputs = 0x76543210;  // RowDots::input_rows: the first ones in order
constexpr int kDotRegisters = 128;

// The same in all lanes of the warp. `weights`, `groups`, `values` and `table` lie in shared memory; `out` anywhere.
struct RowDots {
    // Rows as in the file, `row_bytes` apart. The address modulo 16 is that of the row in a matrix whose data is 16-byte aligned
    // (a copy by aligned_span has it so); up to 3 bytes on both sides of the rows are read and not used.
    const uint8_t* weights;
    uint32_t row_bytes;
    int num_rows;    // any
    int columns;     // a multiple of 32; any number for F32, F16, BF16
    int num_inputs;  // 1..8
    // Input rows: `groups` [num_inputs, ceil(columns / 256)] for quantised weights, `values` [num_inputs, columns] for F32, F16,
    // BF16. Blocks of a last group beyond `columns` are not read.
    const ActGroup* groups;
    const float* values;
    const void* table;  // of load_table; null where table_bytes(type) is 0
    float* out;         // out[input * out_stride + row]; written by single lanes: __syncwarp() before others read it
    uint32_t out_stride;
    // Input i is row (input_rows >> 4 * i) & 15 of `groups` or `values`: an expert takes its rows out of a window's.
    uint32_t input_rows = kAllInputs;
};

// All 32 lanes call together.
__device__ void dot_rows(Type type, const RowDots& p, int lane);

// Fills `table` (shared, 16-byte aligned, table_bytes(type) bytes). All threads of the block call; a barrier must follow.
__device__ void load_table(Type type, void* table, int thread, int num_threads);

}  // namespace tandem::quant
