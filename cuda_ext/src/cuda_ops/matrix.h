// A matrix of weights in the memory of a card.
#pragma once
#include <cstddef>
#include <cstdint>

#include "quant/row.h"

namespace tandem::cuda {

// [rows, columns], rows as in the file, one after the other. `data` is 16-byte aligned and has 16 readable bytes on both sides.
struct DeviceMatrix {
    const uint8_t* data;
    quant::Type type;
    int32_t rows;
    int32_t columns;
    size_t row_bytes;
};

}  // namespace tandem::cuda
