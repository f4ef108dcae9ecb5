// Instruction sets by name.
#pragma once
#include <stdexcept>
#include <string>

#include "quant/row.h"

inline tandem::quant::Isa isa_of(const std::string& name) {
    using tandem::quant::Isa;
    for (const Isa isa : {Isa::portable, Isa::avx2, Isa::avx512})
        if (name == tandem::quant::isa_name(isa)) return isa;
    throw std::invalid_argument("there is no instruction set " + name);
}
