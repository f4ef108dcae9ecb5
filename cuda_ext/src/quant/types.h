// Every weight type: the enumeration and the headers of types/.
#pragma once
#include <cstdint>

#include "quant/type_list.h"
#include "quant/types/bf16.h"
#include "quant/types/f16.h"
#include "quant/types/f32.h"
#include "quant/types/iq1_m.h"
#include "quant/types/iq1_s.h"
#include "quant/types/iq2_s.h"
#include "quant/types/iq2_xs.h"
#include "quant/types/iq2_xxs.h"
#include "quant/types/iq3_s.h"
#include "quant/types/iq3_xxs.h"
#include "quant/types/iq4_nl.h"
#include "quant/types/iq4_xs.h"
#include "quant/types/mxfp4.h"
#include "quant/types/nvfp4.h"
#include "quant/types/q1_0.h"
#include "quant/types/q2_0.h"
#include "quant/types/q2_k.h"
#include "quant/types/q3_k.h"
#include "quant/types/q4_0.h"
#include "quant/types/q4_1.h"
#include "quant/types/q4_k.h"
#include "quant/types/q5_0.h"
#include "quant/types/q5_1.h"
#include "quant/types/q5_k.h"
#include "quant/types/q6_k.h"
#include "quant/types/q8_0.h"
#include "quant/types/tq1_0.h"
#include "quant/types/tq2_0.h"

namespace tandem::quant {

enum class Type : uint32_t {
#define TANDEM_NUMBER(name, number) name = number,
    TANDEM_QUANT_TYPES(TANDEM_NUMBER)
#undef TANDEM_NUMBER
};

}  // namespace tandem::quant
