// Dot products with one input row of the types with sixteen levels.
#include "quant/row_one.cuh"
#include "quant/row_types.cuh"

TANDEM_DOT_ONE(IQ4_NL, dot_one_blocks)
TANDEM_DOT_ONE(IQ4_XS, dot_one_blocks)
TANDEM_DOT_ONE(MXFP4, dot_one_blocks)
TANDEM_DOT_ONE(NVFP4, dot_one_blocks)
