// The Python module: one bind_* function per topic, each in the file of its name.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_cards(nb::module_& module);
void bind_chooser(nb::module_& module);
void bind_link(nb::module_& module);
void bind_program(nb::module_& module);
void bind_quant(nb::module_& module);
#ifdef TANDEM_CUDA
void bind_cuda(nb::module_& module);
#endif

NB_MODULE(_native, module) {
    nb::set_leak_warnings(false);  // a process that ends with an engine still open gives everything back anyway
    module.doc() = "Kernels of the expert tiers and host cards.";
    bind_quant(module);
    bind_cards(module);
    bind_program(module);
    bind_chooser(module);
    bind_link(module);
#ifdef TANDEM_CUDA
    bind_cuda(module);
#endif
}
