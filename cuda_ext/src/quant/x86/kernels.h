// The row kernels of one x86 instruction set, put together.
#pragma once
#include "quant/x86/activations.h"
#include "quant/x86/float_rows.h"
#include "quant/x86/frame.h"

namespace tandem::quant {
namespace {

constexpr int64_t kCachedBytes = 128 * 1024;  // weight rows that stay in the cache while all input rows pass them

using RowFunction = void (*)(const Row&);

RowFunction row_function(Type type) {
    switch (type) {
#define TANDEM_CASE(name, number) \
    case Type::name:              \
        return dot_float_row<name>;
        TANDEM_FLOAT_TYPES(TANDEM_CASE)
#undef TANDEM_CASE
#define TANDEM_CASE(name, number) \
    case Type::name:              \
        return dot_block_row<name>;
        TANDEM_BLOCK_TYPES(TANDEM_CASE)
#undef TANDEM_CASE
    }
    return nullptr;
}

void dot(Type type, const uint8_t* weights, size_t row_stride, int64_t num_rows, int64_t num_values, const ActRow* x, int64_t num_x,
         float* out, int64_t out_stride) {
    const RowFunction row = row_function(type);
    const int64_t cached = kCachedBytes / static_cast<int64_t>(row_stride + 1) + 1;
    for (int64_t begin = 0; begin < num_rows; begin += cached) {
        const int64_t end = begin + cached < num_rows ? begin + cached : num_rows;
        for (int64_t first = 0; first < num_x; first += kInputs) {
            const int count = static_cast<int>(num_x - first < kInputs ? num_x - first : kInputs);
            for (int64_t r = begin; r < end; r++)
                row({weights + static_cast<size_t>(r) * row_stride, num_values, x + first, count, out + first * out_stride + r,
                     out_stride});
        }
    }
}

}  // namespace
}  // namespace tandem::quant
