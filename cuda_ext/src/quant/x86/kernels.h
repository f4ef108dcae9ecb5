// The row kernels of one x86 instruction set, put together. The file that includes it defines, besides `dots` of frame.h:
//   Lanes                         registers of weight rows (lanes_<isa>.h)
//   tile_form<T>()                how the weights of a type lie in a tile
//   tile_from<T>()                input rows from which on turning a tile pays
#pragma once
#include "quant/x86/activations.h"
#include "quant/x86/float_rows.h"
#include "quant/x86/tile_dot.h"

namespace tandem::quant {
namespace {

// Weight rows in memory and what they are multiplied by; the arguments of RowKernels::dot.
struct Rows {
    const uint8_t* weights;
    size_t stride;
    int64_t num_rows;
    int64_t num_values;
    const ActRow* x;
    int64_t num_x;
    float* out;
    int64_t out_stride;

    Rows from_row(int64_t row, int64_t num) const {
        return {weights + static_cast<size_t>(row) * stride, stride, num, num_values, x, num_x, out + row, out_stride};
    }
};

template <class RowFunction>
TANDEM_INLINE void dot_singly(const Rows& rows, RowFunction dot_row) {
    for (int64_t r = 0; r < rows.num_rows; r++)
        dot_row(Row{rows.weights + static_cast<size_t>(r) * rows.stride, rows.num_values, rows.x, static_cast<int>(rows.num_x),
                    rows.out + r, rows.out_stride});
}

template <class T>
void dot_floats(const Rows& rows) {
    dot_singly(rows, dot_float_row<Lanes, T>);
}

template <class T, int num_x>
void dot_turned(const Rows& rows, int first) {
    TurnedGroup turned[num_x][kMaxTurned];
    for (int n = 0; n < num_x; n++)
        for (int64_t s = 0; s < supers_of(rows.num_values); s++) Turned<T>::turn(rows.x[first + n].groups[s], turned[n][s]);
    dot_singly(rows, [&](const Row& row) { dot_turned_row<T, num_x>(row, first, turned); });
}

// Without tiles: for input rows by twos.
template <class T>
void dot_few(const Rows& rows) {
    if constexpr (HasTurned<T>) {
        if (supers_of(rows.num_values) <= kMaxTurned) {
            int x = 0;
            for (; x + 2 <= rows.num_x; x += 2) dot_turned<T, 2>(rows, x);
            if (x < rows.num_x) dot_turned<T, 1>(rows, x);
            return;
        }
    }
    dot_singly(rows, dot_block_row<T>);
}

template <class T>
void dot_blocks(const Rows& rows) {
    int64_t tiled = 0;
    if (rows.num_x >= tile_from<T>())
        for (; tiled + kTileRows <= rows.num_rows; tiled += kTileRows)
            for (int64_t x = 0; x < rows.num_x; x += kMaxTileX)
                dot_tile<Lanes, T, tile_form<T>()>(rows.weights + static_cast<size_t>(tiled) * rows.stride, rows.stride,
                                                   rows.num_values, rows.x + x,
                                                   static_cast<int>(rows.num_x - x < kMaxTileX ? rows.num_x - x : kMaxTileX),
                                                   rows.out + x * rows.out_stride + tiled, rows.out_stride);
    if (tiled < rows.num_rows) dot_few<T>(rows.from_row(tiled, rows.num_rows - tiled));
}

void dot(Type type, const uint8_t* weights, size_t row_stride, int64_t num_rows, int64_t num_values, const ActRow* x, int64_t num_x,
         float* out, int64_t out_stride) {
    const Rows rows{weights, row_stride, num_rows, num_values, x, num_x, out, out_stride};
    switch (type) {
#define TANDEM_CASE(name, number) \
    case Type::name:              \
        return dot_floats<name>(rows);
        TANDEM_FLOAT_TYPES(TANDEM_CASE)
#undef TANDEM_CASE
#define TANDEM_CASE(name, number) \
    case Type::name:              \
        return dot_blocks<name>(rows);
        TANDEM_BLOCK_TYPES(TANDEM_CASE)
#undef TANDEM_CASE
    }
}

}  // namespace
}  // namespace tandem::quant
