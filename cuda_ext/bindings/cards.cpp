// Pool, memory, host card, residency table.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <exception>
#include <optional>
#include <span>

#include "base/buffer.h"
#include "cache/expert_table.h"
#include "cards/host_card.h"
#include "cards/recorder.h"
#include "isa_of.h"
#include "pool/pool.h"

namespace nb = nanobind;
using namespace tandem;

namespace {

using Bytes = nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>;
using Data = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Tokens = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Entries = std::vector<std::tuple<int, int, int32_t>>;

Bytes bytes_of(const View& view) {
    if (!view.buffer->on_host()) throw std::invalid_argument("memory of a GPU has no bytes that the CPU could read");
    auto* owner = new std::shared_ptr<Buffer>(view.buffer);
    nb::capsule keep(owner, [](void* held) noexcept { delete static_cast<std::shared_ptr<Buffer>*>(held); });
    return Bytes(view.data(), {view.nbytes}, keep);
}

void write_bytes(HostCard&, const View& to, const Data& data) {
    if (data.size() > to.nbytes) throw std::invalid_argument("there are more bytes than the place has");
    std::memcpy(to.data(), data.data(), data.size());
}

// One piece of memory becomes table and use counters.
std::shared_ptr<ExpertTable> new_table(HostCard&, int num_layers, int num_experts, const View& memory) {
    const size_t half = memory.nbytes / 2;
    return std::make_shared<ExpertTable>(num_layers, num_experts, View::of(memory.buffer, memory.offset, half),
                                         View::of(memory.buffer, memory.offset + half, half));
}

Ticket update(HostCard& card, std::shared_ptr<ExpertTable> table, const Entries& entries) {
    std::vector<TableEntry> changes;
    for (const auto& [layer, expert, slot] : entries) changes.push_back({layer, expert, slot});
    return card.update(std::move(table), std::move(changes));
}

void run(HostCard& card, const std::shared_ptr<Program>& program, const Tokens& tokens, int64_t position, int num_logits) {
    const std::span<const int32_t> rows(tokens.data(), tokens.size());
    nb::gil_scoped_release released;
    card.run(program, rows, position, num_logits);
}

void parallel_for(Pool& pool, int64_t num_items, int64_t grain, const nb::callable& fn) {
    std::exception_ptr raised;  // the GIL guards it
    const auto call = [&](int64_t begin, int64_t end) {
        nb::gil_scoped_acquire acquired;
        try {
            fn(begin, end);
        } catch (...) {
            if (!raised) raised = std::current_exception();
        }
    };
    {
        nb::gil_scoped_release released;
        pool.parallel_for(num_items, grain, call);
    }
    if (raised) std::rethrow_exception(raised);
}

}  // namespace

void bind_cards(nb::module_& module) {
    nb::exception<Interrupted>(module, "Interrupted");

    nb::class_<View>(module, "View", "A part of a buffer; keeps it alive.")
        .def_ro("nbytes", &View::nbytes)
        .def(
            "discard", [](const View& view) { view.buffer->discard(view.offset, view.nbytes); },
            nb::call_guard<nb::gil_scoped_release>(), "Gives its pages back to the system; its content is lost.")
        .def(
            "touch", [](const View& view) { view.buffer->touch(view.offset, view.nbytes); },
            nb::call_guard<nb::gil_scoped_release>(), "Makes its pages present again.")
        .def("bytes", &bytes_of, nb::sig("def bytes(self) -> numpy.typing.NDArray[numpy.uint8]"), "The memory itself, not a copy.")
        .def(
            "part",
            [](const View& view, size_t offset, size_t nbytes) {
                if (offset > view.nbytes || nbytes > view.nbytes - offset)
                    throw std::invalid_argument("the part is larger than the view");
                return View::of(view.buffer, view.offset + offset, nbytes);
            },
            nb::arg("offset"), nb::arg("nbytes"));

    module.def(
        "wrap_memory",
        [](size_t address, size_t nbytes) { return View::of(Buffer::wrap(reinterpret_cast<void*>(address), nbytes), 0, nbytes); },
        nb::arg("address"), nb::arg("nbytes"), "Somebody else's memory, which must stay mapped as long as any view of it lives.");

    nb::class_<Pool>(module, "Pool", "The threads of a host card.")
        .def(nb::init<int>(), nb::arg("num_threads"))
        .def_prop_ro("num_threads", &Pool::num_threads)
        .def_prop_ro("num_held", &Pool::num_held)
        .def("hold", &Pool::hold, nb::arg("num"), "From the next loop on, the last `num` threads sit out.")
        .def("parallel_for", &parallel_for, nb::arg("num_items"), nb::arg("grain"), nb::arg("fn"),
             "Calls fn(begin, end) for parts of [0, num_items) on the pool's threads; when all are done, raises what a call raised "
             "first.");

    nb::class_<HostCard>(module, "HostCard", "A card in host memory. Thread-safe.")
        .def(
            "__init__",
            [](HostCard* self, std::shared_ptr<Pool> pool, const std::string& isa) {
                new (self) HostCard(std::move(pool), isa_of(isa));
            },
            nb::arg("pool"), nb::arg("isa"))
        .def(
            "allocate",
            [](HostCard& card, const std::string& use, size_t nbytes) { return View::of(card.allocate(use, nbytes), 0, nbytes); },
            nb::arg("use"), nb::arg("nbytes"), nb::call_guard<nb::gil_scoped_release>(), "Zeroed memory, counted under `use`.")
        .def(
            "allocate_slots",
            [](HostCard& card, size_t nbytes, bool present) {
                const View memory = View::of(card.allocate("expert slots", nbytes), 0, nbytes);
                if (!present) memory.buffer->discard(0, nbytes);
                return memory;
            },
            nb::arg("nbytes"), nb::arg("present"), nb::call_guard<nb::gil_scoped_release>(),
            "Memory for slots, which can be given back in parts; given back already unless `present`.")
        .def("bytes_by_use", &HostCard::bytes_by_use)
        .def(
            "pin", [](HostCard&, const View& arena) { return arena.nbytes; }, nb::arg("arena"), "Nothing to do for a host card.")
        .def("unpin", [](HostCard&) {})
        .def("write", &write_bytes, nb::arg("to"), nb::arg("data"), "Bytes to the card.")
        .def("new_table", &new_table, nb::arg("num_layers"), nb::arg("num_experts"), nb::arg("memory"))
        .def(
            "new_program",
            [](HostCard&, int max_rows, int max_logits, int64_t context, int vocab, View tokens, int, int64_t) {
                return std::make_shared<Program>(Program::Limits{max_rows, max_logits, context, vocab}, std::move(tokens));
            },
            nb::arg("max_rows"), nb::arg("max_logits"), nb::arg("context"), nb::arg("vocab"), nb::arg("tokens"), nb::arg("top_k"),
            nb::arg("hidden"))
        .def(
            "new_recorder",
            [](const HostCard& card, std::shared_ptr<Program> program, const std::optional<View>&) {
                return std::make_unique<Recorder>(std::move(program), card.isa());
            },
            nb::arg("program"), nb::arg("ring").none())
        .def("run", &run, nb::arg("program"), nb::arg("tokens"), nb::arg("position"), nb::arg("num_logits"),
             "Runs the program and returns when it is through. Raises Interrupted; ValueError for a window beyond the limits.")
        .def("update", &update, nb::arg("table"), nb::arg("entries"), "Changes (layer, expert, slot) entries; returns a ticket.")
        .def("wait", &HostCard::wait, nb::arg("ticket"), nb::call_guard<nb::gil_scoped_release>())
        .def("copy", &HostCard::copy, nb::arg("to"), nb::arg("source"), nb::arg("after"),
             "Copies on the copy thread, not before command `after` is through; returns a ticket of copies.")
        .def("copied", &HostCard::copied, nb::arg("ticket"))
        .def("wait_copied", &HostCard::wait_copied, nb::arg("ticket"), nb::call_guard<nb::gil_scoped_release>());

    nb::class_<ExpertTable>(module, "ExpertTable", "The residency table of one card.")
        .def(nb::init<int, int, View, View>(), nb::arg("num_layers"), nb::arg("num_experts"), nb::arg("slots"), nb::arg("uses"))
        .def_prop_ro("num_slots", &ExpertTable::num_slots)
        .def_prop_ro("uses", &ExpertTable::uses, "[layers, experts] uint32 and maybe more behind it.")
        .def("set_layer", &ExpertTable::set_layer, nb::arg("layer"), nb::arg("blobs"), nb::arg("blob_bytes"))
        .def("add_slot", &ExpertTable::add_slot, nb::arg("slot"))
        .def("slot", &ExpertTable::slot, nb::arg("slot"))
        .def("blob", &ExpertTable::blob, nb::arg("layer"), nb::arg("expert"))
        .def("layer_blobs", &ExpertTable::layer_blobs, nb::arg("layer"))
        .def("entry", &ExpertTable::entry, nb::arg("layer"), nb::arg("expert"))
        .def("set_peer", &ExpertTable::set_peer, nb::arg("peer"), "Looked up where this table has no slot; before the first run.")
        .def_prop_ro(
            "rows_by_tier",
            [](const ExpertTable& table) {
                std::map<std::string, int64_t> rows;
                for (int tier = 0; tier < kNumTiers; tier++) rows[tier_name(Tier{tier})] = table.rows(Tier{tier});
                return rows;
            },
            "Routed rows so far, by the tier that computed them.");
}
