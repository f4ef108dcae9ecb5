// Dot products with one input row of the K types.
#include "quant/row_one.cuh"
#include "quant/row_types.cuh"

TANDEM_DOT_ONE(Q2_K, dot_one_blocks)
TANDEM_DOT_ONE(Q3_K, dot_one_blocks)
TANDEM_DOT_ONE(Q4_K, dot_one_blocks)
TANDEM_DOT_ONE(Q5_K, dot_one_blocks)
TANDEM_DOT_ONE(Q6_K, dot_one_blocks)
