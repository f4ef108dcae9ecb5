// Dot products with one input row of the types with plain scales, and of the float types.
#include "quant/row_one.cuh"
#include "quant/row_types.cuh"

TANDEM_DOT_ONE(Q4_0, dot_one_blocks)
TANDEM_DOT_ONE(Q4_1, dot_one_blocks)
TANDEM_DOT_ONE(Q5_0, dot_one_blocks)
TANDEM_DOT_ONE(Q5_1, dot_one_blocks)
TANDEM_DOT_ONE(Q8_0, dot_one_blocks)
TANDEM_DOT_ONE(Q1_0, dot_one_blocks)
TANDEM_DOT_ONE(Q2_0, dot_one_blocks)
TANDEM_DOT_ONE(TQ1_0, dot_one_blocks)
TANDEM_DOT_ONE(TQ2_0, dot_one_blocks)
TANDEM_DOT_ONE(F32, dot_one_floats)
TANDEM_DOT_ONE(F16, dot_one_floats)
TANDEM_DOT_ONE(BF16, dot_one_floats)
