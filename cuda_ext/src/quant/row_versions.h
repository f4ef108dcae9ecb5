// The versions of the row kernels that this build holds; row.cpp chooses.
#pragma once
#include "quant/row.h"

namespace tandem::quant {

extern const RowKernels kRowKernelsPortable;

}  // namespace tandem::quant
