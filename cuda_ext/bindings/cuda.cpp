// What a build for CUDA cards adds to the module. `cuda_build` says which it is.
#include <nanobind/nanobind.h>

#include <cstdlib>

#ifdef TANDEM_EMULATED
#include "emulation/stream.h"
#endif

namespace nb = nanobind;

void bind_cuda_attention(nb::module_& module);
void bind_cuda_cards(nb::module_& module);
void bind_cuda_choose(nb::module_& module);
void bind_cuda_device(nb::module_& module);
void bind_cuda_experts(nb::module_& module);
void bind_cuda_pair(nb::module_& module);
void bind_cuda_prompt(nb::module_& module);
void bind_cuda_rows(nb::module_& module);

void bind_cuda(nb::module_& module) {
    // A kernel that is loaded when it is first launched waits until the card is idle; one that waits for another card never is.
    setenv("CUDA_MODULE_LOADING", "EAGER", 0);
#ifdef TANDEM_EMULATED
    module.attr("cuda_build") = "emulated";
    module.def(
        "emulated_hang", [](bool hangs) { tandem::emulation::health().set_hanging(hangs); }, nb::arg("hangs"),
        "Whether the emulated cards of this process do nothing of what they are told.");
#else
    module.attr("cuda_build") = "real";
#endif
    bind_cuda_attention(module);
    bind_cuda_cards(module);
    bind_cuda_choose(module);
    bind_cuda_device(module);
    bind_cuda_experts(module);
    bind_cuda_pair(module);
    bind_cuda_prompt(module);
    bind_cuda_rows(module);
}
