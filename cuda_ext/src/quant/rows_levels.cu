// Dot products of the types with sixteen levels.
#include "quant/row_types.cuh"

TANDEM_DOT_BLOCKS(IQ4_NL)
TANDEM_DOT_BLOCKS(IQ4_XS)
TANDEM_DOT_BLOCKS(MXFP4)
TANDEM_DOT_BLOCKS(NVFP4)
