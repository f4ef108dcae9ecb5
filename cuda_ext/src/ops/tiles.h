// How many weight rows of a matrix are one item of a loop.
#pragma once
#include <cstdint>

namespace tandem {

constexpr int kTile = 32;  // at most: the rows that a row kernel turns at once where it has several input rows

// Fewer for one or two input rows, where kernels go row by row, if threads would not get four tiles each: few tiles leave threads
// without work in the last round.
inline int tile_rows(int64_t num_rows, int num_inputs, int num_threads) {
    constexpr int kLeast = 8;
    int tile = kTile;
    if (num_inputs <= 2)
        while (tile > kLeast && num_rows < int64_t{4} * tile * num_threads) tile /= 2;
    return tile;
}

constexpr int64_t num_tiles(int64_t num_rows, int tile) {
    return (num_rows + tile - 1) / tile;
}

}  // namespace tandem
