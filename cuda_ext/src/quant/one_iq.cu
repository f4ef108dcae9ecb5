// Dot products with one input row of the types with code books.
#include "quant/row_one.cuh"
#include "quant/row_types.cuh"

TANDEM_DOT_ONE(IQ1_S, dot_one_blocks)
TANDEM_DOT_ONE(IQ1_M, dot_one_blocks)
TANDEM_DOT_ONE(IQ2_XXS, dot_one_blocks)
TANDEM_DOT_ONE(IQ2_XS, dot_one_blocks)
TANDEM_DOT_ONE(IQ2_S, dot_one_blocks)
TANDEM_DOT_ONE(IQ3_XXS, dot_one_blocks)
TANDEM_DOT_ONE(IQ3_S, dot_one_blocks)
