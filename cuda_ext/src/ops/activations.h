// Rows of activations in the forms that weight types want.
#pragma once
#include <cstdint>

#include "quant/row.h"

namespace tandem {

constexpr int kGroupValues = 256;

inline int64_t groups_of(int64_t width) {
    return (width + kGroupValues - 1) / kGroupValues;
}

// [rows, width]: floats always; quantised groups where the width is a multiple of 32, else null.
struct Activations {
    const float* values;
    const quant::ActGroup* groups;
    int64_t width;

    quant::ActRow row(int64_t index) const {
        return {groups ? groups + index * groups_of(width) : nullptr, values + index * width};
    }
};

// [rows, columns] of some GGUF type, rows one after the other.
struct Weights {
    const uint8_t* data;
    quant::Type type;
    int64_t rows;
    int64_t columns;
    size_t row_bytes;

    const uint8_t* row(int64_t index) const { return data + index * row_bytes; }
};

}  // namespace tandem
