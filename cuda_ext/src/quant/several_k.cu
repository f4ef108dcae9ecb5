// Dot products with several input rows of the K types.
#include "quant/row_several.cuh"
#include "quant/row_types.cuh"

TANDEM_DOT_SEVERAL(Q2_K, dot_several_blocks)
TANDEM_DOT_SEVERAL(Q3_K, dot_several_blocks)
TANDEM_DOT_SEVERAL(Q4_K, dot_several_blocks)
TANDEM_DOT_SEVERAL(Q5_K, dot_several_blocks)
TANDEM_DOT_SEVERAL(Q6_K, dot_several_blocks)
