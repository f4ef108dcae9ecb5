// Programs and the operations that can be recorded into them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "cards/host_card.h"
#include "cards/recorder.h"
#include "ops/attention.h"

namespace nb = nanobind;
using namespace tandem;

namespace {

using MaybeView = std::optional<View>;

View view_or_empty(const MaybeView& view) {
    return view.value_or(View{});
}

void bind_memory(nb::module_& module) {
    nb::enum_<Rows>(module, "Rows").value("all", Rows::all).value("logits", Rows::logits);
    nb::enum_<KvType>(module, "KvType").value("f16", KvType::f16).value("f32", KvType::f32).value("int8", KvType::int8);
    nb::enum_<Gating>(module, "Gating").value("softmax", Gating::softmax).value("sigmoid", Gating::sigmoid);
    nb::class_<Matrix>(module, "Matrix", "Weights in memory: [rows, columns] of a GGUF type.")
        .def_static("at", &Matrix::in, nb::arg("memory"), nb::arg("type_id"), nb::arg("rows"), nb::arg("columns"))
        .def_prop_ro("rows", [](const Matrix& matrix) { return matrix.weights.rows; })
        .def_prop_ro("columns", [](const Matrix& matrix) { return matrix.weights.columns; });
    nb::class_<BlobMatrix>(module, "BlobMatrix", "One matrix of every blob of a layer.")
        .def_static("at", &blob_matrix, nb::arg("type_id"), nb::arg("offset"), nb::arg("rows"), nb::arg("columns"))
        .def_ro("rows", &BlobMatrix::rows);
    nb::class_<KvMemory>(module, "KvMemory", "One layer's keys and values.")
        .def_static("at", &KvMemory::in, nb::arg("memory"), nb::arg("type"), nb::arg("num_heads"), nb::arg("head_dim"),
                    nb::arg("context"))
        .def_ro("memory", &KvMemory::memory);
    nb::class_<RowsMemory>(
        module, "RowsMemory",
        "Rows of activations: floats and, where the width allows, quantised; with 1 / rms of each row where a norm "
        "is to leave it.")
        .def(
            "__init__",
            [](RowsMemory* self, View values, const MaybeView& groups, int64_t width, const MaybeView& inverse) {
                new (self) RowsMemory{std::move(values), view_or_empty(groups), width, view_or_empty(inverse)};
            },
            nb::arg("values"), nb::arg("groups").none(), nb::arg("width"), nb::arg("inverse").none() = nb::none())
        .def_ro("values", &RowsMemory::values)
        .def_ro("groups", &RowsMemory::groups)
        .def_ro("width", &RowsMemory::width);
}

void bind_records(nb::module_& module) {
    nb::class_<Recorder::Product>(module, "Product", "One matrix of a matmul and where its rows go.")
        .def(
            "__init__",
            [](Recorder::Product* self, Matrix matrix, View out, const MaybeView& residual) {
                new (self) Recorder::Product{std::move(matrix), std::move(out), view_or_empty(residual)};
            },
            nb::arg("matrix"), nb::arg("out"), nb::arg("residual").none() = nb::none());
    nb::class_<Recorder::Heads>(module, "Heads", "Query, key and value rows before their norms and rotation.")
        .def(
            "__init__",
            [](Recorder::Heads* self, View query, View key, View value, int query_heads, const MaybeView& query_gamma,
               const MaybeView& key_gamma, float eps, View angles) {
                new (self) Recorder::Heads{std::move(query),
                                           std::move(key),
                                           std::move(value),
                                           query_heads,
                                           view_or_empty(query_gamma),
                                           view_or_empty(key_gamma),
                                           eps,
                                           std::move(angles)};
            },
            nb::arg("query"), nb::arg("key"), nb::arg("value"), nb::arg("query_heads"), nb::arg("query_gamma").none(),
            nb::arg("key_gamma").none(), nb::arg("eps"), nb::arg("angles"));
    nb::class_<Recorder::Gate>(module, "Gate", "How a router chooses and weighs.")
        .def(
            "__init__",
            [](Recorder::Gate* self, Gating gating, bool renormalise, float scale, int top_k) {
                new (self) Recorder::Gate{gating, renormalise, scale, top_k};
            },
            nb::arg("gating"), nb::arg("renormalise"), nb::arg("scale"), nb::arg("top_k"));
    nb::class_<Recorder::Expert>(module, "Expert", "The matrices of a layer's blobs.")
        .def(
            "__init__",
            [](Recorder::Expert* self, BlobMatrix gate, BlobMatrix up, BlobMatrix down) {
                new (self) Recorder::Expert{gate, up, down};
            },
            nb::arg("gate"), nb::arg("up"), nb::arg("down"));
}

}  // namespace

void bind_program(nb::module_& module) {
    bind_memory(module);
    bind_records(module);
    module.attr("KV_TILE") = kKvTile;
    module.attr("ATTENTION_SPAN") = kSpan;
    module.attr("ATTENTION_SPLIT_ROWS") = kSplitRows;

    nb::class_<Program>(module, "Program", "A forward pass, recorded once and run many times.")
        .def(
            "__init__",
            [](Program* self, int max_rows, int max_logits, int64_t context, int vocab, View tokens) {
                new (self) Program({max_rows, max_logits, context, vocab}, std::move(tokens));
            },
            nb::arg("max_rows"), nb::arg("max_logits"), nb::arg("context"), nb::arg("vocab"), nb::arg("tokens"))
        .def_prop_ro("num_operations", &Program::num_operations)
        .def("interrupt", &Program::interrupt, "Ends the run in progress, or else the next one, with Interrupted. Thread-safe.");

    nb::class_<Recorder>(module, "Recorder", "Records operations into a program and checks every size.")
        .def(
            "__init__",
            [](Recorder* self, std::shared_ptr<Program> program, const HostCard& card) {
                new (self) Recorder(std::move(program), card.isa());
            },
            nb::arg("program"), nb::arg("card"))
        .def("angles", &Recorder::angles, nb::arg("frequencies"), nb::arg("magnitude"), nb::arg("out"))
        .def("embed", &Recorder::embed, nb::arg("table"), nb::arg("out"))
        .def("norm", &Recorder::norm, nb::arg("x"), nb::arg("gamma"), nb::arg("eps"), nb::arg("rows"), nb::arg("out"))
        .def("quantise", &Recorder::quantise, nb::arg("rows"))
        .def("matmul", &Recorder::matmul, nb::arg("products"), nb::arg("x"), nb::arg("rows"))
        .def("rotary", &Recorder::rotary, nb::arg("heads"), nb::arg("kv"))
        .def("attention", &Recorder::attention, nb::arg("query"), nb::arg("query_heads"), nb::arg("kv"), nb::arg("scale"),
             nb::arg("spans"), nb::arg("out"))
        .def("router", &Recorder::router, nb::arg("x"), nb::arg("gamma"), nb::arg("weights"), nb::arg("sums"))
        .def("route", &Recorder::route, nb::arg("sums"), nb::arg("x"), nb::arg("gate"), nb::arg("table"), nb::arg("layer"),
             nb::arg("routed"))
        .def("experts", &Recorder::experts, nb::arg("expert"), nb::arg("table"), nb::arg("layer"), nb::arg("top_k"),
             nb::arg("routed"), nb::arg("x"), nb::arg("hidden"), nb::arg("expert_rows"), nb::arg("out"));
}
