// How much shared memory the dot products of a type want for its code book.
#pragma once
#include <cstdint>

#include "quant/types.h"

namespace tandem::quant {

constexpr uint32_t kMaxTableBytes = 8192;

// Bytes of load_table()'s table, a multiple of 16; 0 where the type has none.
#ifdef __CUDACC__
__host__ __device__
#endif
    constexpr uint32_t table_bytes(Type type) {
    switch (type) {
        case Type::IQ1_S:
        case Type::IQ1_M:
            return 2048 * 2;
        case Type::IQ2_XXS:
            return 256 * 8;
        case Type::IQ2_XS:
            return 512 * 8;
        case Type::IQ2_S:
            return 1024 * 8;
        case Type::IQ3_XXS:
            return 256 * 4;
        case Type::IQ3_S:
            return 512 * 4;
        default:
            return 0;
    }
}

}  // namespace tandem::quant
