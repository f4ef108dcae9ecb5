// Instruction sets by name.
#pragma once
#include <optional>
#include <stdexcept>
#include <string>

#include "quant/row.h"

constexpr tandem::quant::Isa kIsas[] = {tandem::quant::Isa::portable, tandem::quant::Isa::avx2, tandem::quant::Isa::avx512};

inline tandem::quant::Isa isa_of(const std::string& name) {
    for (const tandem::quant::Isa isa : kIsas) {
        if (name != tandem::quant::isa_name(isa)) continue;
        if (!tandem::quant::isa_runs(isa))
            throw std::invalid_argument("this CPU does not run " + name + "; isas() lists what runs");
        return isa;
    }
    throw std::invalid_argument("unknown instruction set '" + name + "'; isas() lists what runs");
}

// None: the best one.
inline tandem::quant::Isa isa_or_best(const std::optional<std::string>& name) {
    return name ? isa_of(*name) : tandem::quant::best_isa();
}
