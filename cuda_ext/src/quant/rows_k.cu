// Dot products of the K types.
#include "quant/row_types.cuh"

TANDEM_DOT_BLOCKS(Q2_K)
TANDEM_DOT_BLOCKS(Q3_K)
TANDEM_DOT_BLOCKS(Q4_K)
TANDEM_DOT_BLOCKS(Q5_K)
TANDEM_DOT_BLOCKS(Q6_K)
