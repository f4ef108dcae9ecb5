// What the types are, and which version of the kernels runs here.
#include "quant/row.h"

#include "quant/row_versions.h"
#include "quant/types.h"

namespace tandem::quant {
namespace {

struct TypeFacts {
    const char* name;
    int64_t block_values, block_bytes;
    bool wants_values;
};

// Null for a number that is not one of ours.
const TypeFacts* find_facts(uint32_t number) {
    switch (number) {
#define TANDEM_CASE(name, number, is_float)                                                            \
    case number: {                                                                                     \
        static constexpr TypeFacts facts = {#name, name::block_values, sizeof(name::Block), is_float}; \
        return &facts;                                                                                 \
    }
#define TANDEM_FLOAT_CASE(name, number) TANDEM_CASE(name, number, true)
#define TANDEM_BLOCK_CASE(name, number) TANDEM_CASE(name, number, false)
        TANDEM_FLOAT_TYPES(TANDEM_FLOAT_CASE)
        TANDEM_BLOCK_TYPES(TANDEM_BLOCK_CASE)
#undef TANDEM_BLOCK_CASE
#undef TANDEM_FLOAT_CASE
#undef TANDEM_CASE
    }
    return nullptr;
}

const TypeFacts& facts_of(Type type) {
    return *find_facts(static_cast<uint32_t>(type));
}

#ifdef TANDEM_X86
bool cpu_has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
           __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
}
// Every extension that the AVX-512 file is compiled for: the compiler may use any of them anywhere in it.
bool cpu_has_avx512() {
    return cpu_has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni") &&
           __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bitalg");
}
#else
bool cpu_has_avx2() {
    return false;
}
bool cpu_has_avx512() {
    return false;
}
#endif

}  // namespace

bool isa_runs(Isa isa) {
    static const bool avx2 = cpu_has_avx2(), avx512 = cpu_has_avx512();
    switch (isa) {
        case Isa::portable:
            return true;
        case Isa::avx2:
            return avx2;
        case Isa::avx512:
            return avx512;
    }
    return false;
}

Isa best_isa() {
    if (isa_runs(Isa::avx512)) return Isa::avx512;
    return isa_runs(Isa::avx2) ? Isa::avx2 : Isa::portable;
}

const char* isa_name(Isa isa) {
    switch (isa) {
        case Isa::portable:
            return "portable";
        case Isa::avx2:
            return "avx2";
        case Isa::avx512:
            return "avx512";
    }
    return "unknown";
}

const RowKernels& row_kernels([[maybe_unused]] Isa isa) {
#ifdef TANDEM_X86
    if (isa == Isa::avx512) return kRowKernelsAvx512;
    if (isa == Isa::avx2) return kRowKernelsAvx2;
#endif
    return kRowKernelsPortable;
}

bool type_known(uint32_t ggml_type) {
    return find_facts(ggml_type) != nullptr;
}
const char* type_name(Type type) {
    return facts_of(type).name;
}
bool type_wants_values(Type type) {
    return facts_of(type).wants_values;
}
int64_t block_values(Type type) {
    return facts_of(type).block_values;
}
int64_t block_bytes(Type type) {
    return facts_of(type).block_bytes;
}
size_t row_bytes(Type type, int64_t num_values) {
    return static_cast<size_t>(num_values / block_values(type) * block_bytes(type));
}

}  // namespace tandem::quant
