// Quantised rows, for tests and loaders. Arrays are checked here; the kernels trust their callers.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "isa_of.h"
#include "quant/row.h"
#include "quant/type_list.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace tandem::quant;

namespace {

template <class T, class... Shape>
using In = nb::ndarray<const T, Shape..., nb::c_contig, nb::device::cpu>;
using Bytes = In<uint8_t, nb::ndim<1>>;
using Floats = In<float, nb::ndim<1>>;
using IsaName = std::optional<std::string>;  // none: the best one

constexpr int64_t kGroupValues = 256;

[[noreturn]] void refuse(const std::string& message) {
    throw std::invalid_argument(message);
}

Type checked_type(uint32_t number) {
    if (!type_known(number)) refuse("unknown weight type " + std::to_string(number) + "; quant_types() lists the known ones");
    return static_cast<Type>(number);
}

int64_t checked_blocks(Type type, size_t num_bytes) {
    const auto bytes = static_cast<int64_t>(num_bytes);
    if (bytes % block_bytes(type) != 0)
        refuse(std::to_string(bytes) + " bytes are not whole blocks of " + type_name(type) + " (" +
               std::to_string(block_bytes(type)) + " bytes each)");
    return bytes / block_bytes(type);
}

template <class T>
nb::ndarray<nb::numpy, T> owned(std::vector<T>&& values, std::initializer_list<size_t> shape) {
    auto* kept = new std::vector<T>(std::move(values));
    nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return {kept->data(), shape, owner};
}

std::vector<ActGroup> quantised(const RowKernels& kernels, const float* x, int64_t num_values, float row_scale) {
    std::vector<ActGroup> groups(static_cast<size_t>((num_values + kGroupValues - 1) / kGroupValues));
    kernels.quantise(x, num_values, row_scale, groups.data());
    return groups;
}

void check_activations(int64_t num_values) {
    if (num_values % 32 != 0) refuse(std::to_string(num_values) + " activations are not whole blocks of 32");
}

nb::tuple quantise(Floats x, float row_scale, const IsaName& isa) {
    const RowKernels& kernels = row_kernels(isa_or_best(isa));
    const auto num_values = static_cast<int64_t>(x.shape(0));
    check_activations(num_values);
    std::vector<ActGroup> groups;
    {
        nb::gil_scoped_release unlocked;
        groups = quantised(kernels, x.data(), num_values, row_scale);
    }
    std::vector<int8_t> q;
    std::vector<float> d;
    std::vector<int16_t> sums;
    for (const ActGroup& group : groups) {
        q.insert(q.end(), std::begin(group.q), std::end(group.q));
        d.insert(d.end(), std::begin(group.d), std::end(group.d));
        sums.insert(sums.end(), std::begin(group.sum16), std::end(group.sum16));
    }
    const size_t n = groups.size();
    return nb::make_tuple(owned(std::move(q), {n, 256}), owned(std::move(d), {n, 8}), owned(std::move(sums), {n, 16}));
}

void dot(uint32_t type_id, In<uint8_t, nb::ndim<2>> weights, In<float, nb::ndim<2>> x,
         nb::ndarray<float, nb::ndim<2>, nb::device::cpu> out, const IsaName& isa) {
    const Type type = checked_type(type_id);
    const RowKernels& kernels = row_kernels(isa_or_best(isa));
    const auto num_rows = static_cast<int64_t>(weights.shape(0)), num_x = static_cast<int64_t>(x.shape(0));
    const auto num_values = static_cast<int64_t>(x.shape(1));
    if (num_values % block_values(type) != 0 || row_bytes(type, num_values) != weights.shape(1))
        refuse("a row of " + std::to_string(num_values) + " values does not take " + std::to_string(weights.shape(1)) +
               " bytes of " + type_name(type));
    if (static_cast<int64_t>(out.shape(0)) != num_x || static_cast<int64_t>(out.shape(1)) != num_rows ||
        (num_rows > 1 && out.stride(1) != 1))
        refuse("out must have one row per input row (" + std::to_string(num_x) + ") of one value per weight row (" +
               std::to_string(num_rows) + "), the values of a row side by side");
    if (!type_wants_values(type)) check_activations(num_values);
    nb::gil_scoped_release unlocked;
    std::vector<std::vector<ActGroup>> groups;
    std::vector<ActRow> rows;
    for (int64_t i = 0; i < num_x; i++) {
        const float* values = x.data() + i * num_values;
        groups.push_back(type_wants_values(type) ? std::vector<ActGroup>{} : quantised(kernels, values, num_values, 1.0f));
        rows.push_back({groups.back().data(), values});
    }
    kernels.dot(type, weights.data(), weights.shape(1), num_rows, num_values, rows.data(), num_x, out.data(), out.stride(0));
}

nb::ndarray<nb::numpy, float> dequantise_array(uint32_t type_id, Bytes data) {
    const Type type = checked_type(type_id);
    const int64_t num_values = checked_blocks(type, data.size()) * block_values(type);
    std::vector<float> out(static_cast<size_t>(num_values));
    {
        nb::gil_scoped_release unlocked;
        dequantise(type, data.data(), num_values, out.data());
    }
    return owned(std::move(out), {static_cast<size_t>(num_values)});
}

void swiglu(Floats gate, Floats up, nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu> out, const IsaName& isa) {
    const RowKernels& kernels = row_kernels(isa_or_best(isa));
    if (gate.size() != up.size() || gate.size() != out.size())
        refuse("gate, up and out differ in length: " + std::to_string(gate.size()) + ", " + std::to_string(up.size()) + ", " +
               std::to_string(out.size()));
    nb::gil_scoped_release unlocked;
    kernels.swiglu(gate.data(), up.data(), static_cast<int64_t>(gate.size()), out.data());
}

std::optional<int64_t> first_bad(uint32_t type_id, Bytes data) {
    const Type type = checked_type(type_id);
    const int64_t num_blocks = checked_blocks(type, data.size());
    nb::gil_scoped_release unlocked;
    const int64_t index = first_bad_block(type, data.data(), num_blocks);
    return index < 0 ? std::nullopt : std::optional<int64_t>(index);
}

nb::dict quant_types() {
    nb::dict types;
#define TANDEM_ENTRY(name, number) \
    types[#name] = nb::make_tuple(number, block_values(static_cast<Type>(number)), block_bytes(static_cast<Type>(number)));
    TANDEM_QUANT_TYPES(TANDEM_ENTRY)
#undef TANDEM_ENTRY
    return types;
}

std::vector<std::string> isas() {
    std::vector<std::string> names;
    for (const Isa isa : kIsas)
        if (isa_runs(isa)) names.emplace_back(isa_name(isa));
    return names;
}

}  // namespace

void bind_quant(nb::module_& module) {
    module.def("quantise", &quantise, "x"_a, "row_scale"_a = 1.0f, "isa"_a = nb::none(),
               "Activations float32 [values], values a multiple of 32, as (q int8 [groups, 256], d float32 [groups, 8], sum16 "
               "int16 [groups, 16]).");
    module.def("dot", &dot, "type_id"_a, "weights"_a, "x"_a, "out"_a, "isa"_a = nb::none(),
               "out float32 [inputs, rows] = x float32 [inputs, values] . weights uint8 [rows, row bytes]; out may be a view with "
               "longer rows.");
    module.def("dequantise", &dequantise_array, "type_id"_a, "data"_a,
               "The float32 values of whole blocks, exactly as GGUF defines them.");
    module.def("swiglu", &swiglu, "gate"_a, "up"_a, "out"_a, "isa"_a = nb::none(), "out = silu(gate) * up, float32 [values] each.");
    module.def("first_bad_block", &first_bad, "type_id"_a, "data"_a,
               "Index of the first block whose scale or minimum (or value, of F32, F16 and BF16) is not finite, or None.");
    module.def("quant_types", &quant_types, "Every weight type: {name: (GGML number, values per block, bytes per block)}.");
    module.def("isas", &isas, "The instruction sets whose kernels run here; the last one is the best.");
}
