// Weight rows in shared memory by input rows in shared memory: the canonical dot products (docs/arithmetic.md), a warp at a time.
//
// The caller, once per block and type, before the first dot product and followed by a block barrier:
//     load_table(type, table, thread, num_threads)    reads global memory that no kernel writes: best before wait_prerequisites()
// and then, for any number of staged rows per warp:
//     dot_rows(type, {...}, lane)
//
// dot_rows calls one of two functions per type that are compiled once, for at most 128 registers a thread (CMakeLists.txt): kernels
// stay the same for all types. dot_window_rows<T> (row_one.cuh) is the same for one input row and one type without a call, for
// kernels where every microsecond counts: a call saves registers in local memory, and what a block of 512 threads saves does not
// fit the first cache.
#pragma once
#include <cuda_runtime.h>

#include "device/shared_address.cuh"
#include "quant/arithmetic.h"
#include "quant/row.h"
#include "quant/shared_group.cuh"
#include "quant/table_bytes.h"
#include "quant/type_list.h"

namespace tandem::quant {

constexpr int kMaxInputs = 8;
constexpr uint32_t kAllInputs = 0x76543210;  // RowDots::input_rows: the first ones in order

// The same in all lanes of the warp. `weights`, `groups`, `values` and `table` lie in shared memory; `out` anywhere.
struct RowDots {
    // Rows as in the file, `row_bytes` apart. The address modulo 16 is that of the row in a matrix whose data is 16-byte aligned
    // (a copy by aligned_span has it so); up to 3 bytes on both sides of the rows are read and not used.
    const uint8_t* weights;
    uint32_t row_bytes;
    int num_rows;    // up to 65,535
    int columns;     // a multiple of 32; any number for F32, F16, BF16
    int num_inputs;  // 1..8
    // Input rows: `groups` [rows, ceil(columns / 256)] for quantised weights, `values` [rows, columns] for F32, F16, BF16; the
    // other one is not read. Blocks of a last group beyond `columns` are not read.
    const SharedGroup* groups;
    const float* values;
    const void* table;  // of load_table; null where table_bytes(type) is 0
    float* out;         // out[input * out_stride + row]; written by single lanes: __syncwarp() before others read it
    uint32_t out_stride;
    // Input i is row (input_rows >> 4 * i) & 15 of `groups` or `values`: an expert takes its rows out of a window's.
    uint32_t input_rows = kAllInputs;
};

// What the function of a type gets: RowDots as twelve words, which are passed in registers. `weights`, `inputs` (groups or
// values) and `table` are addresses of shared memory.
struct SharedDots {
    uint32_t counts;  // rows | inputs << 16 | lane << 24
    uint32_t weights;
    uint32_t row_bytes;
    int columns;
    uint32_t inputs;
    uint32_t table;
    float* out;
    uint32_t out_stride;
    uint32_t input_rows;

    __device__ __forceinline__ int num_rows() const { return static_cast<int>(counts & 0xffff); }
    __device__ __forceinline__ int num_inputs() const { return static_cast<int>(counts >> 16 & 255); }
    __device__ __forceinline__ int lane() const { return static_cast<int>(counts >> 24); }
    __device__ __forceinline__ int num_groups() const { return (columns + kSuper - 1) / kSuper; }
    __device__ __forceinline__ uint32_t input_row(int input) const { return input_rows >> 4 * input & 15; }

    __device__ __forceinline__ const uint8_t* row(int index) const {
        return device::shared_pointer(weights + static_cast<uint32_t>(index) * row_bytes);
    }
    __device__ __forceinline__ const SharedGroup* groups(int input) const {
        const auto groups_bytes = static_cast<uint32_t>(num_groups() * sizeof(SharedGroup));
        return reinterpret_cast<const SharedGroup*>(device::shared_pointer(inputs + input_row(input) * groups_bytes));
    }
    __device__ __forceinline__ const float* values(int input) const {
        const auto values_bytes = static_cast<uint32_t>(columns * sizeof(float));
        return reinterpret_cast<const float*>(device::shared_pointer(inputs + input_row(input) * values_bytes));
    }
};

// By one input row, and by 2 to 8: quant/one_*.cu and quant/several_*.cu.
template <class T>
__device__ void dot_one(SharedDots p);
template <class T>
__device__ void dot_several(SharedDots p);
#define TANDEM_DECLARE(name, number)           \
    template <>                                \
    __device__ void dot_one<name>(SharedDots); \
    template <>                                \
    __device__ void dot_several<name>(SharedDots);
TANDEM_QUANT_TYPES(TANDEM_DECLARE)
#undef TANDEM_DECLARE

__device__ __forceinline__ SharedDots shared_dots(Type type, const RowDots& p, int lane) {
    const bool wants_values = type == Type::F32 || type == Type::F16 || type == Type::BF16;
    const void* inputs = wants_values ? static_cast<const void*>(p.values) : p.groups;
    return {static_cast<uint32_t>(p.num_rows | p.num_inputs << 16 | lane << 24),
            device::shared_address(p.weights),
            p.row_bytes,
            p.columns,
            device::shared_address(inputs),
            device::shared_address(p.table),
            p.out,
            p.out_stride,
            p.input_rows};
}

// All 32 lanes call together.
__device__ __forceinline__ void dot_rows(Type type, const RowDots& p, int lane) {
    const SharedDots dots = shared_dots(type, p, lane);
    switch (type) {
#define TANDEM_CASE(name, number) \
    case Type::name:              \
        return p.num_inputs == 1 ? dot_one<name>(dots) : dot_several<name>(dots);
        TANDEM_QUANT_TYPES(TANDEM_CASE)
#undef TANDEM_CASE
    }
}

// Fills `table` (shared, 16-byte aligned, table_bytes(type) bytes). All threads of the block call; a barrier must follow.
__device__ void load_table(Type type, void* table, int thread, int num_threads);

}  // namespace tandem::quant
