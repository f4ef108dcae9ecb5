// The versions of the row kernels that this build holds; row.cpp chooses.
#pragma once
#include "quant/row.h"

namespace tandem::quant {

extern const RowKernels kRowKernelsPortable;
#ifdef TANDEM_X86
extern const RowKernels kRowKernelsAvx2;
extern const RowKernels kRowKernelsAvx512;
#endif

}  // namespace tandem::quant
