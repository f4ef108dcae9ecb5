#include "quant/row_device.cuh"

#include "quant/grid.h"

namespace tandem::quant {
namespace {

// Entry i of a table of eight-byte entries: words 2 i and 2 i + 1.
template <class Level>
__device__ __forceinline__ void fill_eights(const uint16_t* grid, int num_entries, uint32_t* table, int thread, int num_threads,
                                            Level level) {
    for (int i = thread; i < 2 * num_entries; i += num_threads) {
        const uint16_t packed = grid[i / 2];
        uint32_t word = 0;
        for (int k = 0; k < 4; k++) word |= static_cast<uint32_t>(level(packed, 4 * (i % 2) + k)) << 8 * k;
        table[i] = word;
    }
}
template <class Level>
__device__ __forceinline__ void fill_fours(const uint16_t* grid, int num_entries, uint32_t* table, int thread, int num_threads,
                                           Level level) {
    for (int i = thread; i < num_entries; i += num_threads) {
        uint32_t word = 0;
        for (int k = 0; k < 4; k++) word |= static_cast<uint32_t>(level(grid[i], k)) << 8 * k;
        table[i] = word;
    }
}

}  // namespace

__device__ void load_table(Type type, void* table, int thread, int num_threads) {
    auto* words = static_cast<uint32_t*>(table);
    const auto iq2 = [](uint16_t packed, int i) { return iq2_level(packed, i); };
    switch (type) {
        case Type::IQ2_XXS:
            return fill_eights(kGridIq2Xxs, 256, words, thread, num_threads, iq2);
        case Type::IQ2_XS:
            return fill_eights(kGridIq2Xs, 512, words, thread, num_threads, iq2);
        case Type::IQ2_S:
            return fill_eights(kGridIq2S, 1024, words, thread, num_threads, iq2);
        case Type::IQ3_XXS:
            return fill_fours(kGridIq3Xxs, 256, words, thread, num_threads,
                              [](uint16_t packed, int i) { return iq3_xxs_level(packed, i); });
        case Type::IQ3_S:  // numbers of the levels, see Packed<IQ3_S>
            return fill_fours(kGridIq3S, 512, words, thread, num_threads,
                              [](uint16_t packed, int i) { return (packed >> 3 * i) & 7; });
        case Type::IQ1_S:
        case Type::IQ1_M:  // levels 0, 1, 2 in two bits, packed as they are
            for (int i = thread; i < 1024; i += num_threads)
                words[i] = kGridIq1[2 * i] | static_cast<uint32_t>(kGridIq1[2 * i + 1]) << 16;
            return;
        default:
            return;
    }
}

}  // namespace tandem::quant
