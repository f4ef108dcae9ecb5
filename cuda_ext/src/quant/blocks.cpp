// Whole arrays of blocks: their values, and the search for one that cannot be computed with.
#include <algorithm>

#include "quant/dequantise.h"
#include "quant/row.h"
#include "quant/types.h"

namespace tandem::quant {
namespace {

template <class T>
int64_t find_bad(const void* data, int64_t num_blocks) {
    constexpr int64_t chunk = 256;
    const auto* blocks = static_cast<const typename T::Block*>(data);
    for (int64_t begin = 0; begin < num_blocks; begin += chunk) {
        const int64_t end = std::min(num_blocks, begin + chunk);
        unsigned bad = 0;  // no branch inside: nearly always there is none to find
        for (int64_t b = begin; b < end; b++) bad |= !T::finite(blocks[b]);
        if (!bad) continue;
        return std::find_if_not(blocks + begin, blocks + end, [](const auto& block) { return T::finite(block); }) - blocks;
    }
    return -1;
}

template <class T>
void dequantise_floats(const void* data, int64_t num_values, float* out) {
    const auto* blocks = static_cast<const typename T::Block*>(data);
    for (int64_t i = 0; i < num_values; i++) out[i] = T::value(blocks[i]);
}

template <class T>
void dequantise_blocks(const void* data, int64_t num_values, float* out) {
    const auto* blocks = static_cast<const typename T::Block*>(data);
    constexpr int per_block = T::block_values / kBlock;
    for (int64_t b = 0; b < num_values / kBlock; b++, out += kBlock)
        dequantise_block<T>(blocks[b / per_block], static_cast<int>(b % per_block), out);
}

}  // namespace

int64_t first_bad_block(Type type, const void* data, int64_t num_blocks) {
    switch (type) {
#define TANDEM_CASE(name, number) \
    case Type::name:              \
        return find_bad<name>(data, num_blocks);
        TANDEM_QUANT_TYPES(TANDEM_CASE)
#undef TANDEM_CASE
    }
    return -1;
}

void dequantise(Type type, const void* data, int64_t num_values, float* out) {
    switch (type) {
#define TANDEM_CASE(name, number) \
    case Type::name:              \
        return dequantise_floats<name>(data, num_values, out);
        TANDEM_FLOAT_TYPES(TANDEM_CASE)
#undef TANDEM_CASE
#define TANDEM_CASE(name, number) \
    case Type::name:              \
        return dequantise_blocks<name>(data, num_values, out);
        TANDEM_BLOCK_TYPES(TANDEM_CASE)
#undef TANDEM_CASE
    }
}

}  // namespace tandem::quant
