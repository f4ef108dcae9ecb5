// What a build for CUDA cards adds to the module. `cuda_build` says which it is.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_cuda_attention(nb::module_& module);
void bind_cuda_cards(nb::module_& module);
void bind_cuda_device(nb::module_& module);
void bind_cuda_experts(nb::module_& module);
void bind_cuda_prompt(nb::module_& module);
void bind_cuda_rows(nb::module_& module);

void bind_cuda(nb::module_& module) {
#ifdef TANDEM_EMULATED
    module.attr("cuda_build") = "emulated";
#else
    module.attr("cuda_build") = "real";
#endif
    bind_cuda_attention(module);
    bind_cuda_cards(module);
    bind_cuda_device(module);
    bind_cuda_experts(module);
    bind_cuda_prompt(module);
    bind_cuda_rows(module);
}
