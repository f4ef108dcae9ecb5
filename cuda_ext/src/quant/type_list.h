// QUANT_TYPES: every weight type we read, with GGML's number for it. A type is one line here, one header in types/ and one
// row of docs/quants.md.
#pragma once

#define TANDEM_FLOAT_TYPES(X) \
    X(F32, 0)                 \
    X(F16, 1)                 \
    X(BF16, 30)

#define TANDEM_BLOCK_TYPES(X) \
    X(Q4_0, 2)                \
    X(Q4_1, 3)                \
    X(Q5_0, 6)                \
    X(Q5_1, 7)                \
    X(Q8_0, 8)                \
    X(Q2_K, 10)               \
    X(Q3_K, 11)               \
    X(Q4_K, 12)               \
    X(Q5_K, 13)               \
    X(Q6_K, 14)               \
    X(IQ2_XXS, 16)            \
    X(IQ2_XS, 17)             \
    X(IQ3_XXS, 18)            \
    X(IQ1_S, 19)              \
    X(IQ4_NL, 20)             \
    X(IQ3_S, 21)              \
    X(IQ2_S, 22)              \
    X(IQ4_XS, 23)             \
    X(IQ1_M, 29)              \
    X(TQ1_0, 34)              \
    X(TQ2_0, 35)              \
    X(MXFP4, 39)              \
    X(NVFP4, 40)              \
    X(Q1_0, 41)               \
    X(Q2_0, 42)

#define TANDEM_QUANT_TYPES(X) TANDEM_FLOAT_TYPES(X) TANDEM_BLOCK_TYPES(X)
