// How the next token is chosen, on the host.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <span>
#include <string>

#include "isa_of.h"
#include "ops/chooser.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace tandem;

namespace {

using Logits = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

int32_t choose(Chooser& chooser, const Logits& logits, const std::optional<std::string>& isa) {
    const quant::Isa chosen = isa_or_best(isa);
    nb::gil_scoped_release released;
    return chooser.choose(std::span(logits.data(), logits.size()), chosen);
}

}  // namespace

void bind_chooser(nb::module_& module) {
    nb::class_<Chooser>(module, "Chooser", "How the tokens of an answer are chosen: docs/arithmetic.md. Confined to one thread.")
        .def(
            nb::init<float, int32_t, double, float>(), "temperature"_a, "top_k"_a, "top_p"_a, "min_offset"_a,
            "temperature 0: the greatest logit; top_k 0, top_p 1, min_offset -inf: off. Logits stay that are at least the greatest "
            "plus min_offset. Raises ValueError.")
        .def(
            "change",
            [](Chooser& chooser, int32_t token, float bias, float repetition, float penalty) {
                chooser.change({token, bias, repetition, penalty});
            },
            "token"_a, "bias"_a, "repetition"_a, "penalty"_a,
            "What becomes of a token's logit first: + bias, divided by repetition (multiplied if negative), - penalty. Takes the "
            "place "
            "of an earlier change.")
        .def("set_fraction", &Chooser::set_fraction, "fraction"_a, "The random number of the next token, in units of 2^-53.")
        .def("choose", &choose, "logits"_a, "isa"_a = nb::none(),
             "The token for finite logits float32 [vocab]. Raises ValueError for a change of a token that is not there.");
}
