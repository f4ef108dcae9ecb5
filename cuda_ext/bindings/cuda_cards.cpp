// CUDA cards, their residency tables and programs: the same methods as those of host cards.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <span>

#include "cards/cuda_card.h"
#include "cards/cuda_check.h"
#include "cards/cuda_driver.h"
#include "cards/cuda_program.h"
#include "cards/cuda_recorder.h"
#include "isa_of.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace tandem;

namespace {

using Tokens = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Data = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using RowsIn = nb::ndarray<const uint8_t, nb::ndim<2>, nb::device::cpu>;
using RowsOut = nb::ndarray<uint8_t, nb::ndim<2>, nb::device::cpu>;
using Entries = std::vector<std::tuple<int, int, int32_t>>;
using Released = nb::call_guard<nb::gil_scoped_release>;

View view_of(std::shared_ptr<Buffer> buffer, size_t nbytes) {
    return View::of(std::move(buffer), 0, nbytes);
}

// One piece of memory on the card becomes table and counters; the counters land in pinned memory.
std::shared_ptr<CudaExpertTable> new_table(CudaCard& card, int num_layers, int num_experts, const View& memory) {
    const DeviceScope scope(card.device());
    const size_t table_bytes = (static_cast<size_t>(num_layers) * num_experts * sizeof(int32_t) + 63) / 64 * 64;
    const size_t uses_bytes = CudaExpertTable::uses_bytes(num_layers, num_experts);
    return std::make_shared<CudaExpertTable>(num_layers, num_experts, View::of(memory.buffer, memory.offset, table_bytes),
                                             View::of(memory.buffer, memory.offset + table_bytes, uses_bytes),
                                             view_of(allocate_mapped(uses_bytes), uses_bytes), card.compute_stream());
}

std::map<std::string, int64_t> rows_by_tier(const CudaExpertTable& table) {
    std::map<std::string, int64_t> rows;
    for (int tier = 0; tier < kNumTiers; tier++) rows[tier_name(Tier{tier})] = table.rows(Tier{tier});
    return rows;
}

void write_bytes(CudaCard& card, const View& to, const Data& data) {
    nb::gil_scoped_release released;
    card.write(to, data.data(), data.size());
}

template <class Rows>
RowCopy row_copy(const Rows& rows, size_t card_pitch) {
    if (rows.stride(1) != 1 || rows.stride(0) < 0) throw std::invalid_argument("the bytes of a row must lie one after the other");
    return {rows.shape(0), rows.shape(1), card_pitch, static_cast<size_t>(rows.stride(0))};
}

void read_rows(CudaCard& card, const View& from, size_t pitch, const RowsOut& out) {
    const RowCopy rows = row_copy(out, pitch);
    nb::gil_scoped_release released;
    card.read_rows(out.data(), from, rows);
}

void write_rows(CudaCard& card, const View& to, size_t pitch, const RowsIn& data) {
    const RowCopy rows = row_copy(data, pitch);
    nb::gil_scoped_release released;
    card.write_rows(to, data.data(), rows);
}

Ticket update(CudaCard& card, const std::shared_ptr<CudaExpertTable>& table, const Entries& entries) {
    std::vector<TableEntry> changes;
    for (const auto& [layer, expert, slot] : entries) changes.push_back({layer, expert, slot});
    nb::gil_scoped_release released;
    return card.update(table, changes);
}

void run(CudaCard&, CudaProgram& program, const Tokens& tokens, int64_t position, int num_logits, const Chooser* chooser) {
    const std::span<const int32_t> rows(tokens.data(), tokens.size());
    nb::gil_scoped_release released;
    program.run(rows, position, num_logits, chooser);
}

std::tuple<int, float, float> likeliest(const CudaProgram& program, int row) {
    const std::span<const cuda::Likeliest> rows = program.likeliest();
    if (row < 0 || row >= static_cast<int>(rows.size())) throw std::invalid_argument("the last run has no such row of logits");
    return {rows[row].token, rows[row].peak, rows[row].lowest};
}

void bind_card(nb::module_& module) {
    nb::class_<CudaCard>(module, "CudaCard", "A GPU. Confined to one thread.")
        .def(
            "__init__",
            [](CudaCard* self, int device, std::shared_ptr<Pool> pool, const std::string& isa) {
                new (self) CudaCard(device, std::move(pool), isa_of(isa));
            },
            "device"_a, "pool"_a, "isa"_a)
        .def_prop_ro("name", &CudaCard::name)
        .def("make_current", &CudaCard::make_current, "The calling thread's own card from now on.")
        .def("reach", &CudaCard::reach, "other"_a, "Whether both cards may use each other's memory from here on.")
        .def_prop_ro("free_bytes", &CudaCard::free_bytes)
        .def(
            "allocate",
            [](CudaCard& card, const std::string& use, size_t nbytes) { return view_of(card.allocate(use, nbytes), nbytes); },
            "use"_a, "nbytes"_a, Released(), "Zeroed memory on the card, counted under `use`.")
        .def(
            "allocate_slots",
            [](CudaCard& card, size_t nbytes, bool present) {
                return view_of(card.allocate_segments("expert slots", nbytes, present), nbytes);
            },
            "nbytes"_a, "present"_a, Released(),
            "Memory for slots, which can be given back in parts; given back already unless `present`.")
        .def("bytes_by_use", &CudaCard::bytes_by_use)
        .def("pin", &CudaCard::pin, "arena"_a, Released(),
             "Pins the arena as far as the system allows; returns how many bytes are.")
        .def("unpin", &CudaCard::unpin, Released(), "Before the arena's memory goes.")
        .def("write", &write_bytes, "to"_a, "data"_a, "Bytes to the card; blocks.")
        .def("read_rows", &read_rows, "source"_a, "pitch"_a, "out"_a, "Rows, `pitch` bytes apart on the card, to the host; blocks.")
        .def("write_rows", &write_rows, "to"_a, "pitch"_a, "data"_a, "Rows to the card, `pitch` bytes apart there; blocks.")
        .def_prop_rw(
            "window_blocks", [](const CudaCard& card) { return card.shape().window_blocks; }, &CudaCard::set_window_blocks)
        .def_prop_rw("streamed_ratio", &CudaCard::streamed_ratio, &CudaCard::set_streamed_ratio)
        .def("new_table", &new_table, "num_layers"_a, "num_experts"_a, "memory"_a)
        .def(
            "new_program",
            [](const std::shared_ptr<CudaCard>& card, int max_rows, int max_logits, int64_t context, int vocab, View tokens,
               int top_k, int64_t hidden) {
                return std::make_shared<CudaProgram>(card, Program::Limits{max_rows, max_logits, context, vocab}, std::move(tokens),
                                                     top_k, hidden);
            },
            "max_rows"_a, "max_logits"_a, "context"_a, "vocab"_a, "tokens"_a, "top_k"_a, "hidden"_a)
        .def(
            "new_recorder",
            [](CudaCard&, std::shared_ptr<CudaProgram> program, View ring) {
                return std::make_unique<CudaRecorder>(std::move(program), std::move(ring));
            },
            "program"_a, "ring"_a)
        .def("run", &run, "program"_a, "tokens"_a, "position"_a, "num_logits"_a, "chooser"_a.none() = nb::none(),
             "Runs the program and returns when it is through. With a chooser the card takes the token behind the one row of "
             "logits: "
             "`chosen`. Raises Interrupted; ValueError for a window beyond the limits.")
        .def("update", &update, "table"_a, "entries"_a, "Changes (layer, expert, slot) entries; returns a ticket.")
        .def("wait", &CudaCard::wait, "ticket"_a, Released())
        .def("copy", &CudaCard::copy, "to"_a, "source"_a, "after"_a,
             "Copies on the copy stream, not before update `after` has been passed; returns a ticket of copies.")
        .def("copied", &CudaCard::copied, "ticket"_a)
        .def("wait_copied", &CudaCard::wait_copied, "ticket"_a, Released());
}

void bind_table(nb::module_& module) {
    nb::class_<CudaExpertTable>(module, "CudaExpertTable", "The residency table of a GPU, with its mirror in the host.")
        .def_prop_ro("num_slots", [](const CudaExpertTable& table) { return table.mirror().num_slots(); })
        .def_prop_ro("uses", &CudaExpertTable::uses, "What runs used, [layers, experts] uint32, until the reader sets it to zero.")
        .def(
            "set_layer",
            [](CudaExpertTable& table, int layer, View blobs, size_t blob_bytes) {
                table.mirror().set_layer(layer, std::move(blobs), blob_bytes);
            },
            "layer"_a, "blobs"_a, "blob_bytes"_a)
        .def("add_slot", &CudaExpertTable::add_slot, "slot"_a)
        .def(
            "slot", [](const CudaExpertTable& table, int slot) { return table.mirror().slot(slot); }, "slot"_a)
        .def(
            "blob", [](const CudaExpertTable& table, int layer, int expert) { return table.mirror().blob(layer, expert); },
            "layer"_a, "expert"_a)
        .def(
            "entry", [](const CudaExpertTable& table, int layer, int expert) { return table.mirror().entry(layer, expert); },
            "layer"_a, "expert"_a)
        .def(
            "layer_blobs", [](const CudaExpertTable& table, int layer) { return table.mirror().layer_blobs(layer); }, "layer"_a)
        .def_prop_ro("rows_by_tier", &rows_by_tier, "Routed rows so far, by the tier that computed them.")
        .def_prop_ro("bytes_from_arena", &CudaExpertTable::bytes_from_arena, "Copied to the card for prompts so far.")
        .def_prop_ro("bytes_from_peer", &CudaExpertTable::bytes_from_peer, "The same from the second card's slots.");
}

void bind_cuda_program(nb::module_& module) {
    nb::class_<CudaProgram>(module, "CudaProgram", "A forward pass on a GPU.")
        .def_prop_ro("num_operations", &CudaProgram::num_operations)
        .def_prop_ro("num_voided", &CudaProgram::num_voided, "Windows that were given up because a tier did not answer in time.")
        .def("profile", &CudaProgram::profile, "token"_a, "position"_a, "repeats"_a, Released(),
             "Milliseconds by kind of step of one window of one row, each alone.")
        .def("prepare_windows", &CudaProgram::prepare_windows, Released(),
             "Captures what windows of one row will be launched as, so that none waits for it.")
        .def("likeliest", &likeliest, "row"_a, "(token, peak, lowest) of a row of the last run's logits.")
        .def_prop_ro("chosen", &CudaProgram::chosen,
                     "The token that the last run chose; None without a chooser, or where there were too many to choose among.")
        .def("read_logits", &CudaProgram::read_logits, "row"_a, Released(),
             "A row of the last run's logits, valid until the next call.")
        .def("interrupt", &CudaProgram::interrupt,
             "Ends the run in progress, or else the next one, with Interrupted. Thread-safe.");
    nb::class_<CudaRecorder>(module, "CudaRecorder", "Records a model's page into steps of a GPU.")
        .def("angles", &CudaRecorder::angles, "frequencies"_a, "magnitude"_a, "out"_a)
        .def("embed", &CudaRecorder::embed, "table"_a, "out"_a)
        .def("norm", &CudaRecorder::norm, "x"_a, "gamma"_a, "eps"_a, "rows"_a, "out"_a)
        .def("quantise", &CudaRecorder::quantise, "rows"_a)
        .def("matmul", &CudaRecorder::matmul, "products"_a, "x"_a, "rows"_a)
        .def("rotary", &CudaRecorder::rotary, "heads"_a, "kv"_a)
        .def("attention", &CudaRecorder::attention, "query"_a, "query_heads"_a, "kv"_a, "scale"_a, "spans"_a, "out"_a)
        .def("router", &CudaRecorder::router, "x"_a, "gamma"_a, "weights"_a, "sums"_a)
        .def("route", &CudaRecorder::route, "sums"_a, "x"_a, "gate"_a, "table"_a, "layer"_a, "routed"_a)
        .def("experts", &CudaRecorder::experts, "expert"_a, "table"_a, "layer"_a, "top_k"_a, "routed"_a, "x"_a, "hidden"_a,
             "expert_rows"_a, "out"_a);
}

}  // namespace

void bind_cuda_cards(nb::module_& module) {
    nb::exception<CudaError>(module, "CudaError");
    module.def("cuda_device_count", &cuda_device_count, "How many GPUs this process can use.");
    module.def("cuda_has_context", &has_context, "device"_a, "Whether this process holds memory for itself on that GPU.");
    bind_card(module);
    bind_table(module);
    bind_cuda_program(module);
}
