// The float values of blocks, exactly as GGUF defines them.
#pragma once
#include "quant/arithmetic.h"

namespace tandem::quant {

// The 32 values from 32 * j on of one block.
template <class T>
TANDEM_HD void dequantise_block(const typename T::Block& b, int j, float* out) {
    const Block32 block = T::decode(b, j);
    for (int i = 0; i < kBlock; i++) {
        const float product = mul(mul(block.d, static_cast<float>(block.scale[i / 16])), static_cast<float>(block.w[i]));
        out[i] = T::has_minima ? add(product, mul(block.m, static_cast<float>(block.minimum[i / 16]))) : product;
    }
}

}  // namespace tandem::quant
