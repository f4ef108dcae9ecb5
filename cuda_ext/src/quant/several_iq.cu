// Dot products with several input rows of the types with code books.
#include "quant/row_several.cuh"
#include "quant/row_types.cuh"

TANDEM_DOT_SEVERAL(IQ1_S, dot_several_blocks)
TANDEM_DOT_SEVERAL(IQ1_M, dot_several_blocks)
TANDEM_DOT_SEVERAL(IQ2_XXS, dot_several_blocks)
TANDEM_DOT_SEVERAL(IQ2_XS, dot_several_blocks)
TANDEM_DOT_SEVERAL(IQ2_S, dot_several_blocks)
TANDEM_DOT_SEVERAL(IQ3_XXS, dot_several_blocks)
TANDEM_DOT_SEVERAL(IQ3_S, dot_several_blocks)
