// Dot products with several input rows of the types with sixteen levels.
#include "quant/row_several.cuh"
#include "quant/row_types.cuh"

TANDEM_DOT_SEVERAL(IQ4_NL, dot_several_blocks)
TANDEM_DOT_SEVERAL(IQ4_XS, dot_several_blocks)
TANDEM_DOT_SEVERAL(MXFP4, dot_several_blocks)
TANDEM_DOT_SEVERAL(NVFP4, dot_several_blocks)
