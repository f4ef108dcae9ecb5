// The link between two engines, and the bare words of a channel.
#include "link/link.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "isa_of.h"
#include "link/channel_words.h"

namespace nb = nanobind;
using namespace tandem;
using link::Geometry;

namespace {

link::ChannelWords& words_in(const View& memory) {
    if (memory.nbytes < sizeof(link::ChannelWords)) throw std::invalid_argument("a channel's words need more memory");
    return *memory.as<link::ChannelWords>();
}

}  // namespace

void bind_link(nb::module_& module) {
    nb::class_<Geometry>(module, "LinkGeometry", "What both engines of a link must have alike.")
        .def(
            "__init__",
            [](Geometry* self, uint32_t num_layers, uint32_t num_experts, uint32_t top_k, uint32_t max_rows, uint32_t hidden) {
                new (self) Geometry{num_layers, num_experts, top_k, max_rows, hidden, 0};
            },
            nb::arg("num_layers"), nb::arg("num_experts"), nb::arg("top_k"), nb::arg("max_rows"), nb::arg("hidden"))
        .def_prop_ro("file_bytes", &link::file_bytes, "Size of the link file.");
    nb::enum_<link::Status>(module, "LinkStatus")
        .value("computed", link::Status::computed)
        .value("dropped", link::Status::dropped)
        .value("refused", link::Status::refused);
    module.attr("LINK_CHANNEL_WORDS_BYTES") = sizeof(link::ChannelWords);
    module.def(
        "link_resident",
        [](const View& file, int role, const Geometry& geometry) {
            if (role < 0 || role > 1 || file.nbytes != link::file_bytes(geometry))
                throw std::invalid_argument("this is not the link file of that role and geometry");
            const size_t offset = link::Parts::in(file.data(), geometry).resident[role] - reinterpret_cast<uint8_t*>(file.data());
            return View::of(file.buffer, file.offset + offset, size_t{geometry.num_layers} * geometry.num_experts);
        },
        nb::arg("file"), nb::arg("role"), nb::arg("geometry"), "[layers, experts] bytes: 1 for what that role's card holds.");
    module.def("link_format", &link::format, nb::arg("file"), nb::arg("fingerprint"), nb::arg("geometry"),
               "Writes the header of a new, zeroed link file.");
    module.def("link_may_ask", [](const View& words) { return link::may_ask(words_in(words)); }, nb::arg("words"));
    module.def("link_post", [](const View& words) { link::post(words_in(words)); }, nb::arg("words"));
    module.def("link_has_request", [](const View& words) { return link::has_request(words_in(words)); }, nb::arg("words"));
    module.def(
        "link_answer", [](const View& words, link::Status status, uint32_t late) { link::answer(words_in(words), status, late); },
        nb::arg("words"), nb::arg("status"), nb::arg("late"));
    module.def("link_begin_serving", [](const View& words) { link::begin_serving(words_in(words)); }, nb::arg("words"));
    module.def(
        "link_status", [](const View& words) { return static_cast<link::Status>(link::load(words_in(words).status)); },
        nb::arg("words"));

    nb::class_<link::Link>(module, "Link", "One engine's end of a link on a host card.")
        .def(
            "__init__",
            [](link::Link* self, View file, int role, const std::string& fingerprint, const Geometry& geometry,
               std::shared_ptr<ExpertTable> table, const std::string& isa, int num_threads, double stuck_after_s) {
                new (self) link::Link(std::move(file), {role, fingerprint, geometry, isa_of(isa), num_threads, stuck_after_s},
                                      std::move(table));
            },
            nb::arg("file"), nb::arg("role"), nb::arg("fingerprint"), nb::arg("geometry"), nb::arg("table"), nb::arg("isa"),
            nb::arg("num_threads"), nb::arg("stuck_after_s"))
        .def("set_layer", &link::Link::set_layer, nb::arg("layer"), nb::arg("gate"), nb::arg("up"), nb::arg("down"))
        .def(
            "attach_to", [](const std::shared_ptr<link::Link>& self, ExpertTable& table) { table.set_linked(self); },
            nb::arg("table"), "From now on the table's linked experts are asked of the partner.")
        .def("serve", &link::Link::serve, nb::arg("serving"), "Starts or stops to offer this card's experts to the partner.")
        .def_prop_ro("serving", &link::Link::serving)
        .def_prop_ro("partner_attached", &link::Link::partner_attached)
        .def("begin_window", &link::Link::begin_window, nb::arg("num_rows"), "Before a run: whether the partner is asked in it.")
        .def("take_loss", &link::Link::take_loss, "Whether the last run is void because the partner did not answer; true once.")
        .def("hold", &link::Link::hold, nb::call_guard<nb::gil_scoped_release>())
        .def("release", &link::Link::release)
        .def("close", &link::Link::close, nb::call_guard<nb::gil_scoped_release>(), "Leaves the link. Idempotent.")
        .def_prop_ro("served_rows", &link::Link::served_rows)
        .def_prop_ro("late_experts", &link::Link::late_experts)
        .def_prop_ro("num_losses", &link::Link::num_losses);
}
