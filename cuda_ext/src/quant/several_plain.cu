// Dot products with several input rows of the types with plain scales, and of the float types.
#include "quant/row_several.cuh"
#include "quant/row_types.cuh"

TANDEM_DOT_SEVERAL(Q4_0, dot_several_blocks)
TANDEM_DOT_SEVERAL(Q4_1, dot_several_blocks)
TANDEM_DOT_SEVERAL(Q5_0, dot_several_blocks)
TANDEM_DOT_SEVERAL(Q5_1, dot_several_blocks)
TANDEM_DOT_SEVERAL(Q8_0, dot_several_blocks)
TANDEM_DOT_SEVERAL(Q1_0, dot_several_blocks)
TANDEM_DOT_SEVERAL(Q2_0, dot_several_blocks)
TANDEM_DOT_SEVERAL(TQ1_0, dot_several_blocks)
TANDEM_DOT_SEVERAL(TQ2_0, dot_several_blocks)
TANDEM_DOT_SEVERAL(F32, dot_several_floats)
TANDEM_DOT_SEVERAL(F16, dot_several_floats)
TANDEM_DOT_SEVERAL(BF16, dot_several_floats)
