// The choice of a token on a card, for tests: arrays in, tokens out.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <optional>
#include <vector>

#include "cuda_arrays.h"
#include "cuda_ops/choose_window.h"
#include "ops/chooser.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace tandem;
using namespace tandem::bindings;

namespace {

using Logits = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <class T>
CardArray zeroed() {
    const std::vector<uint8_t> zeros(sizeof(T));
    return CardArray(zeros.data(), zeros.size());
}

template <class T>
T value_of(CardArray& array) {
    T value;
    std::memcpy(&value, array.read().data(), sizeof value);
    return value;
}

// One after the other in the same memory, as windows do.
std::vector<std::optional<int32_t>> choose(const std::vector<const Chooser*>& choosers, const Logits& logits) {
    const auto vocab = static_cast<int32_t>(logits.size());
    CardArray row(logits.data(), logits.nbytes()), changed(logits.nbytes()), likeliest(sizeof(cuda::Likeliest)),
        token(sizeof(int32_t));
    CardArray parts = zeroed<cuda::LikeliestParts>(), scratch = zeroed<cuda::ChoiceScratch>();
    std::vector<std::optional<int32_t>> tokens;
    for (const Chooser* chooser : choosers) {
        cuda::WindowState window{};
        window.choice = chooser->rule();
        CardArray state(&window, sizeof window), changes(chooser->changes().data(), chooser->changes().size_bytes());
        cuda::likeliest_window({row.as<float>(), vocab, parts.as<cuda::LikeliestParts>(), likeliest.as<cuda::Likeliest>()}, 1, true,
                               nullptr);
        cuda::choose_window(
            {state.as<cuda::WindowState>(), row.as<float>(), parts.as<cuda::LikeliestParts>(), vocab, changes.as<LogitChange>(),
             changed.as<float>(), scratch.as<cuda::ChoiceScratch>(), token.as<int32_t>()},
            true, nullptr);
        CUDA_CHECK(cudaDeviceSynchronize());
        const auto chosen = value_of<int32_t>(token);
        tokens.push_back(chosen == cuda::kNotChosen ? std::nullopt : std::optional(chosen));
        for (CardArray* array : {&row, &changed, &likeliest, &parts, &scratch, &state, &changes})
            array->read();  // looks at the guards
    }
    return tokens;
}

}  // namespace

void bind_cuda_choose(nb::module_& module) {
    module.def("card_choose", &choose, "choosers"_a, "logits"_a,
               "The tokens that a card chooses from logits float32 [vocab], one after the other; None where there are too many to "
               "choose among.");
}
