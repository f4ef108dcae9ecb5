// The row kernels in plain C++: the version that defines the bits.
#include <algorithm>

#include "quant/arithmetic.h"
#include "quant/row.h"
#include "quant/row_versions.h"
#include "quant/types.h"

namespace tandem::quant {
namespace {

constexpr int kInputs = 8;  // input rows that share one decoding of the weights

void quantise(const float* x, int64_t num_values, float row_scale, ActGroup* out) {
    const int64_t num_blocks = num_values / kBlock;
    for (int64_t g = 0; g < (num_blocks + kBlocks - 1) / kBlocks; g++) {
        out[g] = ActGroup{};
        for (int64_t b = g * kBlocks; b < std::min(num_blocks, (g + 1) * kBlocks); b++)
            quantise_block(x + b * kBlock, row_scale, out[g], static_cast<int>(b % kBlocks));
    }
}

void quantise_place(const float* x, float row_scale, ActGroup* out, int place) {
    quantise_block(x, row_scale, *out, place);
}

void swiglu(const float* gate, const float* up, int64_t num_values, float* out) {
    for (int64_t i = 0; i < num_values; i++) out[i] = swiglu_value(gate[i], up[i]);
}

struct Row {
    const uint8_t* weights;
    int64_t num_values;
    const ActRow* x;
    int64_t num_x;  // up to kInputs
    float* out;     // one value per input row, out_stride apart
    int64_t out_stride;
};

template <class T>
void dot_float_row(const Row& row) {
    const auto* weights = reinterpret_cast<const typename T::Block*>(row.weights);
    for (int64_t x = 0; x < row.num_x; x++) {
        float sums[kBlock] = {};
        for (int64_t i = 0; i < row.num_values; i++)
            sums[i % kBlock] = fma(T::value(weights[i]), row.x[x].values[i], sums[i % kBlock]);
        row.out[x * row.out_stride] = tree_of_lanes(sums);
    }
}

template <class T>
void dot_block_row(const Row& row) {
    const auto* blocks = reinterpret_cast<const typename T::Block*>(row.weights);
    constexpr int per_block = T::block_values / kBlock;
    const int64_t num_blocks = row.num_values / kBlock;
    float places[kInputs][kBlocks] = {};
    for (int64_t begin = 0; begin < num_blocks; begin += kTree * kBlocks) {
        float terms[kInputs][kBlocks][kTree] = {};
        for (int64_t b = begin; b < std::min(num_blocks, begin + kTree * kBlocks); b++) {
            const Block32 weights = T::decode(blocks[b / per_block], static_cast<int>(b % per_block));
            const int64_t group = b / kBlocks, place = b % kBlocks;
            for (int64_t x = 0; x < row.num_x; x++) {
                const ActGroup& act = row.x[x].groups[group];
                const float value = block_value<T::has_minima>(weights, act.q + kBlock * place, act.sum16 + 2 * place);
                terms[x][place][group % kTree] = mul(act.d[place], value);
            }
        }
        for (int64_t x = 0; x < row.num_x; x++)
            for (int place = 0; place < kBlocks; place++) places[x][place] = add(places[x][place], tree_of_terms(terms[x][place]));
    }
    for (int64_t x = 0; x < row.num_x; x++) row.out[x * row.out_stride] = tree_of_places(places[x]);
}

void dot_row(Type type, const Row& row) {
    switch (type) {
#define TANDEM_CASE(name, number) \
    case Type::name:              \
        return dot_float_row<name>(row);
        TANDEM_FLOAT_TYPES(TANDEM_CASE)
#undef TANDEM_CASE
#define TANDEM_CASE(name, number) \
    case Type::name:              \
        return dot_block_row<name>(row);
        TANDEM_BLOCK_TYPES(TANDEM_CASE)
#undef TANDEM_CASE
    }
}

void dot(Type type, const uint8_t* weights, size_t row_stride, int64_t num_rows, int64_t num_values, const ActRow* x, int64_t num_x,
         float* out, int64_t out_stride) {
    for (int64_t first = 0; first < num_x; first += kInputs)
        for (int64_t r = 0; r < num_rows; r++)
            dot_row(type, {weights + static_cast<size_t>(r) * row_stride, num_values, x + first,
                           std::min<int64_t>(kInputs, num_x - first), out + first * out_stride + r, out_stride});
}

}  // namespace

const RowKernels kRowKernelsPortable = {quantise, quantise_place, dot, swiglu};

}  // namespace tandem::quant
