// Tiles by input rows. `Lanes` is a register full of weight rows:
//   Int, Float, kLanes, load(int words), load(floats), broadcast (of one word or float in memory), zero(), to_float, add, mul, fma,
//   store, and add_half<form, num_x>: adds the products of sixteen values of two registers of rows and num_x inputs to int32 sums.
#pragma once
#include "quant/x86/tile_inputs.h"

namespace tandem::quant {
namespace {

constexpr int kTileVectors = 2;  // registers of rows that share the broadcast activations
constexpr int kMaxTileX = 64;    // input rows for which a tile is decoded once

// What is added up over the runs of a row: the eight sums of each input row.
struct alignas(64) TileSums {
    float place[kMaxTileX][kBlocks][kTileRows];
};

template <class Lanes, TileForm form, int num_x>
struct PlaceProblem {
    const Tile<form.words>& tile;
    const TileInput<form.words>* inputs;  // num_x
    int count;                            // super-blocks
    int place;
    int first_row;
};

// The terms of super-block s: terms[v][x].
template <class Lanes, TileForm form, int num_x>
TANDEM_INLINE void tile_terms(const PlaceProblem<Lanes, form, num_x>& p, int s, typename Lanes::Float (*terms)[num_x]) {
    using Float = typename Lanes::Float;
    constexpr int halves = form.halves ? 2 : 1;
    const int j = p.place;
    Float value[kTileVectors][num_x];
#pragma GCC unroll 2
    for (int h = 0; h < halves; h++) {
        typename Lanes::Int sums[kTileVectors][num_x];
#pragma GCC unroll 8
        for (int x = 0; x < num_x; x++)
            for (int v = 0; v < kTileVectors; v++) sums[v][x] = Lanes::broadcast(&p.inputs[x].scales[j].start[h][s]);
        constexpr int words = form.words / 2;
        const uint32_t* values[num_x];
#pragma GCC unroll 8
        for (int x = 0; x < num_x; x++) values[x] = p.inputs[x].q[j][s] + words * h;
        Lanes::template add_half<form, num_x>(p.tile.w[j][s] + words * h, p.first_row, values, sums);
        if constexpr (halves == 1) {
#pragma GCC unroll 8
            for (int x = 0; x < num_x; x++) values[x] += words;
            Lanes::template add_half<form, num_x>(p.tile.w[j][s] + words, p.first_row, values, sums);
        }
#pragma GCC unroll 2
        for (int v = 0; v < kTileVectors; v++) {
            Float scale{};
            if constexpr (halves == 2) scale = Lanes::load(p.tile.scale[h][j][s] + p.first_row + v * Lanes::kLanes);
#pragma GCC unroll 8
            for (int x = 0; x < num_x; x++) {
                const Float sum = Lanes::to_float(sums[v][x]);
                if constexpr (halves == 1)
                    value[v][x] = sum;
                else
                    value[v][x] = h == 0 ? Lanes::mul(sum, scale) : Lanes::fma(sum, scale, value[v][x]);
            }
        }
    }
#pragma GCC unroll 2
    for (int v = 0; v < kTileVectors; v++) {
        const int row = p.first_row + v * Lanes::kLanes;
        const Float d = Lanes::load(p.tile.d[j][s] + row);
#pragma GCC unroll 8
        for (int x = 0; x < num_x; x++) {
            const PlaceScales& scales = p.inputs[x].scales[j];
            Float total = Lanes::mul(value[v][x], d);
            if constexpr (form.minima) {
                Float minima = Lanes::broadcast(&scales.sum[0][s]);
                if constexpr (halves == 2) {
                    minima = Lanes::mul(minima, Lanes::load(p.tile.minimum[0][j][s] + row));
                    minima = Lanes::fma(Lanes::broadcast(&scales.sum[1][s]), Lanes::load(p.tile.minimum[1][j][s] + row), minima);
                }
                total = Lanes::fma(value[v][x], d, Lanes::mul(Lanes::load(p.tile.m[j][s] + row), minima));
            }
            terms[v][x] = Lanes::mul(Lanes::broadcast(&scales.d[s]), total);
        }
    }
}

// Adds a run's terms of one place to `sums` of the inputs.
template <class Lanes, TileForm form, int num_x>
void tile_place(const PlaceProblem<Lanes, form, num_x>& p, float (*sums)[kBlocks][kTileRows]) {
    typename Lanes::Float terms[kTree][kTileVectors][num_x];
    for (int s = 0; s < p.count; s++) tile_terms(p, s, terms[s]);
    for (int s = p.count; s < kTree; s++)
        for (auto& vectors : terms[s])
            for (auto& term : vectors) term = Lanes::zero();
    for (int v = 0; v < kTileVectors; v++)
        for (int x = 0; x < num_x; x++) {
            float* out = sums[x][p.place] + p.first_row + v * Lanes::kLanes;
            const auto pair = [&](int s) { return Lanes::add(terms[s][v][x], terms[s + 1][v][x]); };
            const auto tree = Lanes::add(Lanes::add(pair(0), pair(2)), Lanes::add(pair(4), pair(6)));
            Lanes::store(out, Lanes::add(Lanes::load(out), tree));
        }
}

// All places of a run for up to kTileInputs inputs.
template <class Lanes, TileForm form>
void tile_run(const Tile<form.words>& tile, int count, const TileInput<form.words>* inputs, int num_x,
              float (*sums)[kBlocks][kTileRows]) {
    for (int place = 0; place < kBlocks; place++)
        for (int row = 0; row < kTileRows; row += kTileVectors * Lanes::kLanes) {
            int x = 0;
            for (; x + 4 <= num_x; x += 4) tile_place<Lanes, form, 4>({tile, inputs + x, count, place, row}, sums + x);
            if (x + 2 <= num_x) tile_place<Lanes, form, 2>({tile, inputs + x, count, place, row}, sums + x), x += 2;
            if (x < num_x) tile_place<Lanes, form, 1>({tile, inputs + x, count, place, row}, sums + x);
        }
}

template <class Lanes>
TANDEM_INLINE void store_results(const float (*a)[kTileRows], float* out) {
    for (int row = 0; row < kTileRows; row += Lanes::kLanes) {
        const auto pair = [&](int j) { return Lanes::add(Lanes::load(a[j] + row), Lanes::load(a[j + 4] + row)); };
        const auto tree = Lanes::add(Lanes::add(pair(0), pair(2)), Lanes::add(pair(1), pair(3)));
        Lanes::store(out + row, Lanes::add(tree, Lanes::zero()));
    }
}

// kTileRows weight rows by num_x <= kMaxTileX input rows: out[x * out_stride + row].
template <class Lanes, class T, TileForm form>
void dot_tile(const uint8_t* weights, size_t row_stride, int64_t num_values, const ActRow* x, int num_x, float* out,
              int64_t out_stride) {
    constexpr int offset = tile_offset<T>(form);
    Tile<form.words> tile;
    TileSums sums;
    TileInput<form.words> inputs[kTileInputs];
    std::memset(sums.place, 0, sizeof sums.place[0] * static_cast<size_t>(num_x));
    const int64_t num_supers = (num_values + kSuper - 1) / kSuper;
    for (int64_t begin = 0; begin < num_supers; begin += kTree) {
        const int count = static_cast<int>(num_supers - begin < kTree ? num_supers - begin : kTree);
        fill<T, form>(weights, row_stride, num_values, begin, count, tile);
        for (int first = 0; first < num_x; first += kTileInputs) {
            const int num = num_x - first < kTileInputs ? num_x - first : kTileInputs;
            for (int i = 0; i < num; i++) prepare<form>(x[first + i], offset, begin, count, inputs[i]);
            tile_run<Lanes, form>(tile, count, inputs, num, sums.place + first);
        }
    }
    for (int i = 0; i < num_x; i++) store_results<Lanes>(sums.place[i], out + i * out_stride);
}

}  // namespace
}  // namespace tandem::quant
