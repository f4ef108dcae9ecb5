// Operations of a prompt's chunk on a card, for tests: arrays in, arrays out.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <list>
#include <optional>
#include <tuple>
#include <vector>

#include "base/require.h"
#include "cache/tier.h"
#include "cuda_arrays.h"
#include "cuda_ops/experts_prompt.h"
#include "cuda_ops/matmul_prompt.h"
#include "cuda_ops/norm_prompt.h"
#include "cuda_ops/route_prompt.h"
#include "cuda_ops/router.h"
#include "cuda_ops/tile_prompt.h"
#include "ops/experts.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace tandem;
using tandem::bindings::CardArray;

namespace {

template <class T, size_t dims>
using In = nb::ndarray<const T, nb::ndim<dims>, nb::c_contig, nb::device::cpu>;

template <class Array>
CardArray given(const Array& array) {
    return CardArray(array.data(), array.nbytes());
}

void finish() {
    CUDA_CHECK(cudaDeviceSynchronize());
}

// Half rows on the card with guards of their own.
struct HalfArrays {
    CardArray values, scale;
    size_t num_rows, width;

    HalfArrays(size_t num_rows, size_t width)
        : values(num_rows * width * sizeof(uint16_t)), scale(num_rows * sizeof(float)), num_rows(num_rows), width(width) {}

    cuda::HalfRows rows() { return {values.as<uint16_t>(), scale.as<float>(), static_cast<int32_t>(width)}; }
    nb::tuple numpy() { return nb::make_tuple(values.numpy<uint16_t>({num_rows, width}), scale.numpy<float>({num_rows})); }
};

nb::tuple norm_prompt(In<float, 2> x, In<float, 1> gamma, float eps) {
    const size_t rows = x.shape(0), width = x.shape(1);
    CardArray input = given(x), factors = given(gamma), inverse(rows * sizeof(float));
    HalfArrays out(rows, width);
    cuda::norm_prompt({input.as<float>(), factors.as<float>(), eps, out.rows(), inverse.as<float>()}, static_cast<int>(rows),
                      nullptr);
    finish();
    return nb::make_tuple(out.numpy(), inverse.numpy<float>({rows}));
}

nb::tuple halve_prompt(In<float, 2> x) {
    CardArray input = given(x);
    HalfArrays out(x.shape(0), x.shape(1));
    cuda::halve_prompt({input.as<float>(), out.rows()}, static_cast<int>(x.shape(0)), nullptr);
    finish();
    return out.numpy();
}

nb::ndarray<nb::numpy, int64_t> router(In<float, 2> x, In<float, 1> gamma, In<float, 2> weights, bool is_window) {
    const size_t rows = x.shape(0), num_experts = weights.shape(1);
    CardArray input = given(x), factors = given(gamma), matrix = given(weights);
    const std::vector<int64_t> zeros(rows * num_experts);
    CardArray sums(zeros.data(), zeros.size() * sizeof(int64_t));
    const cuda::RouterRowsProblem problem{input.as<float>(),
                                          factors.as<float>(),
                                          matrix.as<float>(),
                                          static_cast<int32_t>(x.shape(1)),
                                          static_cast<int32_t>(num_experts),
                                          sums.as<int64_t>()};
    (is_window ? cuda::router_window : cuda::router_prompt)(problem, static_cast<int>(rows), nullptr);
    finish();
    return sums.numpy<int64_t>({rows, num_experts});
}

// A weight matrix and what is added to its product.
using Part = std::tuple<uint32_t, In<uint8_t, 2>, std::optional<In<float, 2>>>;

nb::list matmul_prompt(In<float, 2> x, const std::vector<Part>& parts) {
    require(parts.size() <= cuda::kMaxPromptParts, "up to three matrices");
    const size_t rows = x.shape(0), width = x.shape(1);
    CardArray input = given(x);
    HalfArrays halves(rows, width);
    cuda::MatmulPromptProblem problem{halves.rows(), {}, static_cast<int>(parts.size())};
    std::list<CardArray> weights, outs, residuals;
    for (size_t i = 0; i < parts.size(); i++) {
        const auto& [type, matrix, residual] = parts[i];
        const size_t columns = matrix.shape(0);
        weights.emplace_back(matrix.data(), matrix.nbytes());
        outs.emplace_back(rows * columns * sizeof(float));
        if (residual) residuals.emplace_back(residual->data(), residual->nbytes());
        problem.parts[i] = {{weights.back().as<uint8_t>(), static_cast<quant::Type>(type), static_cast<int32_t>(columns),
                             static_cast<int32_t>(width), matrix.shape(1)},
                            outs.back().as<float>(),
                            residual ? residuals.back().as<float>() : nullptr};
    }
    cuda::halve_prompt({input.as<float>(), halves.rows()}, static_cast<int>(rows), nullptr);
    cuda::matmul_prompt(problem, static_cast<int>(rows), nullptr);
    finish();
    nb::list results;
    size_t i = 0;
    for (CardArray& out : outs) results.append(out.numpy<float>({rows, std::get<1>(parts[i++]).shape(0)}));
    return results;
}

struct RoutePromptCase {
    In<int64_t, 2> sums;
    In<float, 1> inverse;
    In<int32_t, 1> slots;
    size_t blob_bytes;
    int top_k;
    Gating gating;
    bool renormalise;
    float scale;

    size_t num_rows() const { return sums.shape(0); }
    size_t num_experts() const { return sums.shape(1); }
    size_t num_pairs() const { return num_rows() * top_k; }
};

struct ListArrays {
    CardArray experts, tiles, sizes;

    explicit ListArrays(size_t num_experts, size_t max_tiles)
        : experts(num_experts * sizeof(ExpertRows)), tiles(max_tiles * sizeof(cuda::RowTile)), sizes(2 * sizeof(int32_t)) {}

    cuda::ExpertList list() {
        return {experts.as<ExpertRows>(), sizes.as<int32_t>(), tiles.as<cuda::RowTile>(), sizes.as<int32_t>() + 1};
    }
    int size(int index) { return reinterpret_cast<const int32_t*>(sizes.read().data())[index]; }
};

// What route_prompt writes.
struct RoutedArrays {
    CardArray sums, inverse, slots, ids, weights, order, places, counts, firsts, uses, tier_rows;
    int max_tiles;
    ListArrays resident;

    explicit RoutedArrays(const RoutePromptCase& c)
        : sums(given(c.sums)),
          inverse(given(c.inverse)),
          slots(given(c.slots)),
          ids(4 * c.num_pairs()),
          weights(4 * c.num_pairs()),
          order(4 * c.num_pairs()),
          places(4 * c.num_pairs()),
          counts(4 * c.num_experts()),
          firsts(4 * c.num_experts()),
          uses(std::vector<uint32_t>(c.num_experts(), 7).data(), 4 * c.num_experts()),
          tier_rows(std::vector<uint64_t>(kNumTiers, 1000).data(), kNumTiers * sizeof(uint64_t)),
          max_tiles(cuda::max_row_tiles(static_cast<int>(c.num_pairs()), static_cast<int>(c.num_experts()))),
          resident(c.num_experts(), max_tiles) {}

    cuda::RoutedPrompt routed(const RoutePromptCase& c) {
        return {ids.as<int32_t>(),
                weights.as<float>(),
                order.as<int32_t>(),
                places.as<int32_t>(),
                counts.as<int32_t>(),
                firsts.as<int32_t>(),
                c.top_k,
                static_cast<int>(c.num_experts())};
    }
    void run(const RoutePromptCase& c, const uint8_t* slot_base) {
        const cuda::PromptResidency residency{slots.as<int32_t>(), slot_base, c.blob_bytes, uses.as<uint32_t>(),
                                              tier_rows.as<unsigned long long>()};
        cuda::route_prompt(
            {sums.as<int64_t>(), inverse.as<float>(), c.gating, c.renormalise, c.scale, routed(c), residency, resident.list()},
            static_cast<int>(c.num_rows()), nullptr);
    }
};

nb::dict route_prompt(const RoutePromptCase& c) {
    RoutedArrays arrays(c);
    arrays.run(c, nullptr);
    finish();
    const auto num_experts = static_cast<size_t>(arrays.resident.size(0)), num_tiles = static_cast<size_t>(arrays.resident.size(1));
    const std::vector<uint8_t> experts = arrays.resident.experts.read(), tiles = arrays.resident.tiles.read();
    nb::list listed, row_tiles;
    for (size_t i = 0; i < num_experts; i++) {
        const ExpertRows& rows = reinterpret_cast<const ExpertRows*>(experts.data())[i];
        listed.append(nb::make_tuple(reinterpret_cast<uintptr_t>(rows.blob), rows.expert, rows.first, rows.count));
    }
    for (size_t i = 0; i < num_tiles; i++) {
        const cuda::RowTile& tile = reinterpret_cast<const cuda::RowTile*>(tiles.data())[i];
        row_tiles.append(nb::make_tuple(tile.index, tile.first));
    }
    const size_t rows = c.num_rows(), places = c.top_k, pairs = c.num_pairs(), all = c.num_experts();
    nb::dict result;
    result["ids"] = arrays.ids.numpy<int32_t>({rows, places});
    result["weights"] = arrays.weights.numpy<float>({rows, places});
    result["order"] = arrays.order.numpy<int32_t>({pairs});
    result["places"] = arrays.places.numpy<int32_t>({pairs});
    result["counts"] = arrays.counts.numpy<int32_t>({all});
    result["firsts"] = arrays.firsts.numpy<int32_t>({all});
    result["uses"] = arrays.uses.numpy<uint32_t>({all});
    result["tier_rows"] = arrays.tier_rows.numpy<uint64_t>({kNumTiers});
    result["resident"] = listed;
    result["tiles"] = row_tiles;
    result["max_tiles"] = arrays.max_tiles;
    return result;
}

cuda::PromptMatrix part_of(const BlobMatrix& matrix) {
    return {matrix.type, matrix.offset, static_cast<int32_t>(matrix.rows), static_cast<int32_t>(matrix.columns), matrix.row_bytes};
}

// The experts of a batch that are in use, their blobs copied into a buffer one after the other.
void stream_batch(const cuda::ExpertsPromptProblem& problem, RoutedArrays& arrays, In<uint8_t, 2> blobs,
                  const std::vector<int>& batch) {
    const size_t blob_bytes = blobs.shape(1);
    const std::vector<uint8_t> counts = arrays.counts.read(), firsts = arrays.firsts.read();
    CardArray buffer(batch.size() * blob_bytes);
    std::vector<ExpertRows> experts;
    for (const int expert : batch) {
        const int count = reinterpret_cast<const int32_t*>(counts.data())[expert];
        if (count == 0) continue;
        uint8_t* blob = buffer.as<uint8_t>() + experts.size() * blob_bytes;
        CUDA_CHECK(cudaMemcpy(blob, blobs.data() + expert * blob_bytes, blob_bytes, cudaMemcpyHostToDevice));
        experts.push_back({blob, expert, reinterpret_cast<const int32_t*>(firsts.data())[expert], count});
    }
    if (experts.empty()) return;
    ListArrays list(experts.size(), arrays.max_tiles);
    const auto num_experts = static_cast<int32_t>(experts.size());
    CUDA_CHECK(cudaMemcpy(list.experts.data(), experts.data(), experts.size() * sizeof(ExpertRows), cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaMemcpy(list.sizes.data(), &num_experts, sizeof num_experts, cudaMemcpyHostToDevice));
    cuda::list_tiles_prompt(list.list(), nullptr);
    cuda::experts_gate_up_prompt(problem, list.list(), arrays.max_tiles, nullptr);
    cuda::experts_down_prompt(problem, list.list(), arrays.max_tiles, nullptr);
    finish();
    list.tiles.read();
}

nb::dict experts_prompt(const RoutePromptCase& c, In<float, 2> x, In<float, 2> hidden, In<uint8_t, 2> blobs,
                        In<uint8_t, 2> slot_blobs, const BlobMatrix& gate, const BlobMatrix& up, const BlobMatrix& down,
                        const std::vector<std::vector<int>>& batches) {
    const size_t rows = c.num_rows(), pairs = c.num_pairs(), width = gate.rows, values = x.shape(1);
    RoutedArrays arrays(c);
    CardArray input = given(x), out = given(hidden), slots = given(slot_blobs);
    CardArray products(pairs * width * sizeof(float)), expert_rows(pairs * values * sizeof(float));
    HalfArrays halves(rows, values), product_halves(pairs, width);
    const cuda::ExpertsPromptProblem problem{part_of(gate),  part_of(up),          part_of(down),         arrays.routed(c),
                                             halves.rows(),  products.as<float>(), product_halves.rows(), expert_rows.as<float>(),
                                             out.as<float>()};
    cuda::halve_prompt({input.as<float>(), halves.rows()}, static_cast<int>(rows), nullptr);
    arrays.run(c, slots.as<uint8_t>());
    cuda::experts_gate_up_prompt(problem, arrays.resident.list(), arrays.max_tiles, nullptr);
    cuda::experts_down_prompt(problem, arrays.resident.list(), arrays.max_tiles, nullptr);
    finish();
    for (const std::vector<int>& batch : batches) stream_batch(problem, arrays, blobs, batch);
    cuda::experts_combine_prompt(problem, static_cast<int>(rows), nullptr);
    finish();
    nb::dict result;
    result["hidden"] = out.numpy<float>({rows, values});
    result["products"] = products.numpy<float>({pairs, width});
    result["expert_rows"] = expert_rows.numpy<float>({pairs, values});
    result["places"] = arrays.places.numpy<int32_t>({pairs});
    product_halves.numpy();
    return result;
}

size_t prompt_shared_bytes(uint32_t type, size_t shared_limit) {
    const cuda::SideShape side = cuda::side_shape(static_cast<quant::Type>(type), 0, shared_limit);
    return cuda::tile_shared_bytes(side, side);
}

}  // namespace

void bind_cuda_prompt(nb::module_& module) {
    module.def("norm_prompt", &norm_prompt, "x"_a, "gamma"_a, "eps"_a,
               "((halves uint16 [rows, width], scale [rows]), 1 / rms float32 [rows])");
    module.def("halve_prompt", &halve_prompt, "x"_a, "(halves uint16 [rows, width], scale [rows])");
    module.def("card_router", &router, "x"_a, "gamma"_a, "weights"_a, "is_window"_a, "Sums int64 [rows, experts].");
    module.def("matmul_prompt", &matmul_prompt, "x"_a, "parts"_a,
               "Products float32 [rows, columns] of x with up to three (type, weight rows, residual or None).");
    module.def("prompt_shared_bytes", &prompt_shared_bytes, "type_id"_a, "shared_limit"_a,
               "Shared memory of a block of matmul_prompt where a block may have `shared_limit` bytes.");
    nb::class_<RoutePromptCase>(module, "RoutePromptCase", "How the rows of a chunk are routed.")
        .def(
            "__init__",
            [](RoutePromptCase* self, In<int64_t, 2> sums, In<float, 1> inverse, In<int32_t, 1> slots, size_t blob_bytes, int top_k,
               Gating gating, bool renormalise,
               float scale) { new (self) RoutePromptCase{sums, inverse, slots, blob_bytes, top_k, gating, renormalise, scale}; },
            nb::kw_only(), "sums"_a, "inverse"_a, "slots"_a, "blob_bytes"_a, "top_k"_a, "gating"_a, "renormalise"_a, "scale"_a);
    module.def("route_prompt", &route_prompt, "case"_a, "Everything that route_prompt writes; uses begin at 7, tier rows at 1000.");
    module.def("experts_prompt", &experts_prompt, "case"_a, nb::kw_only(), "x"_a, "hidden"_a, "blobs"_a, "slot_blobs"_a, "gate"_a,
               "up"_a, "down"_a, "batches"_a,
               "Routes, computes the resident experts, then every batch of others from a buffer of its own, and combines.");
}
