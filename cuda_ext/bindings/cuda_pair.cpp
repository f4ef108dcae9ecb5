// The second card of an engine, and the link between two engines, on CUDA cards.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <string>

#include "cards/cuda_link.h"
#include "cards/cuda_peer.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace tandem;

using Released = nb::call_guard<nb::gil_scoped_release>;

void bind_cuda_pair(nb::module_& module) {
    nb::class_<CudaPeer>(module, "CudaPeer", "A second card whose slots an engine's windows use. Confined to the engine loop.")
        .def(nb::init<std::shared_ptr<CudaProgram>, std::shared_ptr<CudaExpertTable>, std::shared_ptr<CudaCard>,
                      std::shared_ptr<CudaExpertTable>, bool>(),
             "program"_a, "table"_a, "peer_card"_a, "peer_table"_a, "direct"_a)
        .def("attach", &CudaPeer::attach, Released(), "Before experts come into its slots.")
        .def("detach", &CudaPeer::detach, Released(), "Before its slots lose their memory.")
        .def_prop_rw("streamed_ratio", &CudaPeer::streamed_ratio, &CudaPeer::set_streamed_ratio)
        .def_prop_ro("served_rows", &CudaPeer::served_rows);
    nb::class_<CudaLink>(module, "CudaLink", "One engine's end of a link between CUDA cards. Confined to the engine loop.")
        .def(
            "__init__",
            [](CudaLink* self, View file, int role, const std::string& fingerprint, const link::Geometry& geometry,
               std::shared_ptr<CudaProgram> program, std::shared_ptr<CudaExpertTable> table, double stuck_after_s) {
                new (self)
                    CudaLink(std::move(file), {role, fingerprint, geometry, stuck_after_s}, std::move(program), std::move(table));
            },
            "file"_a, "role"_a, "fingerprint"_a, "geometry"_a, "program"_a, "table"_a, "stuck_after_s"_a)
        .def("serve", &CudaLink::serve, "serving"_a, Released(), "Starts or stops to offer this card's experts.")
        .def_prop_ro("serving", &CudaLink::serving)
        .def_prop_ro("partner_attached", &CudaLink::partner_attached)
        .def("take_loss", &CudaLink::take_loss, "Whether the last run is void because the partner did not answer; true once.")
        .def_prop_ro("served_rows", &CudaLink::served_rows)
        .def_prop_ro("late_experts", &CudaLink::late_experts)
        .def_prop_ro("num_losses", &CudaLink::num_losses)
        .def("close", &CudaLink::close, Released());
}
