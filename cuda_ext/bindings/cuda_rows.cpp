// Products and embeddings of a window on a card, for tests: arrays in, arrays out.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "cuda_arrays.h"
#include "cuda_ops/embed.h"
#include "cuda_ops/norm_matmul_window.h"
#include "ops/activations.h"
#include "quant/type_list.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace tandem;
using namespace tandem::bindings;

namespace {

template <class T, class... Shape>
using In = nb::ndarray<const T, Shape..., nb::c_contig, nb::device::cpu>;
using Rows = In<float, nb::ndim<2>>;
using RowBytes = In<uint8_t, nb::ndim<2>>;
using Out = nb::ndarray<nb::numpy, float>;
using Residuals = std::vector<std::optional<Rows>>;

// (multiprocessors, shared bytes of a block, shared bytes of a multiprocessor)
using Shape = std::tuple<int, size_t, size_t>;

cuda::CardShape card_shape(const Shape& shape) {
    return {std::get<0>(shape), std::get<1>(shape), std::get<2>(shape)};
}

quant::Type checked_type(uint32_t number) {
    if (!quant::type_known(number)) throw std::invalid_argument("unknown weight type " + std::to_string(number));
    return static_cast<quant::Type>(number);
}

// A matrix's rows on the card.
class CardMatrix {
  public:
    CardMatrix(uint32_t type, const RowBytes& rows, size_t columns) : bytes_(rows.data(), rows.size()) {
        matrix_ = {bytes_.as<uint8_t>(), checked_type(type), static_cast<int32_t>(rows.shape(0)), static_cast<int32_t>(columns),
                   rows.shape(1)};
        if (columns % quant::block_values(matrix_.type) != 0 ||
            quant::row_bytes(matrix_.type, static_cast<int64_t>(columns)) != rows.shape(1))
            throw std::invalid_argument("a row of " + std::to_string(columns) + " values does not take " +
                                        std::to_string(rows.shape(1)) + " bytes");
    }
    const cuda::DeviceMatrix& matrix() const { return matrix_; }

  private:
    CardArray bytes_;
    cuda::DeviceMatrix matrix_;
};

// Products, their matrices and outputs, as long as a call lasts.
class CardProducts {
  public:
    CardProducts(const std::vector<uint32_t>& types, const std::vector<RowBytes>& weights, size_t num_rows, size_t columns,
                 const Residuals& residuals)
        : num_rows_(num_rows) {
        if (types.size() != weights.size() || residuals.size() != weights.size() || weights.size() > cuda::kMaxProducts)
            throw std::invalid_argument("types, weights and residuals differ in number, or are too many");
        for (size_t i = 0; i < weights.size(); i++) {
            matrices_.push_back(std::make_unique<CardMatrix>(types[i], weights[i], columns));
            const size_t nbytes = num_rows * weights[i].shape(0) * sizeof(float);
            outs_.push_back(residuals[i] ? std::make_unique<CardArray>(residuals[i]->data(), nbytes)
                                         : std::make_unique<CardArray>(nbytes));
            auto* out = outs_.back()->as<float>();
            products.product[i] = {matrices_.back()->matrix(), out, residuals[i] ? out : nullptr};
        }
        products.num_products = static_cast<int32_t>(weights.size());
    }
    std::vector<Out> read() {
        CUDA_CHECK(cudaDeviceSynchronize());
        std::vector<Out> out;
        for (size_t i = 0; i < outs_.size(); i++)
            out.push_back(outs_[i]->numpy<float>({num_rows_, static_cast<size_t>(matrices_[i]->matrix().rows)}));
        return out;
    }

    cuda::Products products{};

  private:
    size_t num_rows_;
    std::vector<std::unique_ptr<CardMatrix>> matrices_;
    std::vector<std::unique_ptr<CardArray>> outs_;
};

// Quantised by the host; blocks beyond the end hold noise, which must not be read.
std::vector<quant::ActGroup> quantised(const Rows& x) {
    const auto columns = static_cast<int64_t>(x.shape(1)), groups = groups_of(columns);
    std::vector<quant::ActGroup> out(x.shape(0) * static_cast<size_t>(groups));
    for (size_t row = 0; row < x.shape(0); row++) {
        quant::ActGroup* to = out.data() + row * static_cast<size_t>(groups);
        quant::row_kernels(quant::best_isa()).quantise(x.data() + row * x.shape(1), columns, 1.0f, to);
        for (int64_t block = columns / 32; block < 8 * groups; block++) to[block / 8].d[block % 8] = 1e30f;
    }
    return out;
}

std::vector<Out> matmul_window(const std::vector<uint32_t>& types, const std::vector<RowBytes>& weights, const Rows& x,
                               const Residuals& residuals, const Shape& shape) {
    CardProducts products(types, weights, x.shape(0), x.shape(1), residuals);
    const std::vector<quant::ActGroup> groups = x.shape(1) % 32 == 0 ? quantised(x) : std::vector<quant::ActGroup>{};
    CardArray card_groups(groups.data(), groups.size() * sizeof(quant::ActGroup)), values(x.data(), x.nbytes());
    cuda::matmul_window(
        {static_cast<int32_t>(x.shape(0)), card_groups.as<quant::ActGroup>(), values.as<float>(), products.products},
        card_shape(shape), true, nullptr);
    return products.read();
}

// One product of one row, what it is added to, and the sums of a router behind it.
nb::tuple matmul_router(uint32_t type, const RowBytes& weights, const Rows& x, const Rows& residual,
                        const In<float, nb::ndim<1>>& gamma, const In<float, nb::ndim<2>>& router, const Shape& shape) {
    CardProducts products({type}, {weights}, 1, x.shape(1), {residual});
    const std::vector<quant::ActGroup> groups = quantised(x);
    const std::vector<int64_t> zeros(router.shape(1));
    CardArray card_groups(groups.data(), groups.size() * sizeof(quant::ActGroup)), values(x.data(), x.nbytes());
    CardArray factors(gamma.data(), gamma.nbytes()), matrix(router.data(), router.nbytes()),
        sums(zeros.data(), zeros.size() * sizeof(int64_t));
    products.products.router = {factors.as<float>(), matrix.as<float>(), sums.as<int64_t>(), static_cast<int32_t>(zeros.size())};
    cuda::matmul_window({1, card_groups.as<quant::ActGroup>(), values.as<float>(), products.products}, card_shape(shape), true,
                        nullptr);
    return nb::make_tuple(products.read()[0], sums.numpy<int64_t>({1, zeros.size()}));
}

std::vector<Out> norm_matmul_window(const std::vector<uint32_t>& types, const std::vector<RowBytes>& weights, const Rows& x,
                                    const In<float, nb::ndim<1>>& gamma, float eps, const Shape& shape) {
    if (gamma.shape(0) != x.shape(1)) throw std::invalid_argument("gamma and x differ in width");
    CardProducts products(types, weights, x.shape(0), x.shape(1), Residuals(weights.size()));
    CardArray card_x(x.data(), x.nbytes()), card_gamma(gamma.data(), gamma.nbytes()), values(x.nbytes());
    CardArray groups(x.shape(0) * static_cast<size_t>(groups_of(static_cast<int64_t>(x.shape(1)))) * sizeof(quant::ActGroup));
    cuda::norm_matmul_window({static_cast<int32_t>(x.shape(0)), card_x.as<float>(), card_gamma.as<float>(), eps, products.products,
                              groups.as<quant::ActGroup>(), values.as<float>()},
                             card_shape(shape), true, nullptr);
    return products.read();
}

Out embed(uint32_t type, const RowBytes& table, size_t columns, const std::vector<int32_t>& tokens) {
    const CardMatrix matrix(type, table, columns);
    for (const int32_t token : tokens)
        if (token < 0 || token >= matrix.matrix().rows)
            throw std::invalid_argument("token " + std::to_string(token) + " is not in the table");
    CardArray card_tokens(tokens.data(), tokens.size() * sizeof(int32_t)), out(tokens.size() * columns * sizeof(float));
    cuda::embed({card_tokens.as<int32_t>(), static_cast<int32_t>(tokens.size()), matrix.matrix(), out.as<float>()}, true, nullptr);
    CUDA_CHECK(cudaDeviceSynchronize());
    return out.numpy<float>({tokens.size(), columns});
}

// Where no byte is read: only shapes matter.
nb::dict plan_products(const std::vector<uint32_t>& types, const std::vector<int32_t>& rows, int32_t columns, int num_rows,
                       bool with_norm, const Shape& shape) {
    cuda::Products products{};
    products.num_products = static_cast<int32_t>(types.size());
    if (types.size() != rows.size() || types.size() > cuda::kMaxProducts)
        throw std::invalid_argument("types and rows do not match");
    for (size_t i = 0; i < types.size(); i++) {
        const quant::Type type = checked_type(types[i]);
        products.product[i].weights = {nullptr, type, rows[i], columns, quant::row_bytes(type, columns)};
    }
    const cuda::ProductsPlan plan = cuda::plan_products(products, num_rows, with_norm, card_shape(shape));
    nb::dict out;
    out["num_blocks"] = plan.num_blocks;
    out["launch_rows"] = plan.launch_rows;
    out["shared_bytes"] = plan.shared_bytes;
    out["num_warps"] = plan.ring_plan.num_warps;
    out["num_stages"] = plan.ring_plan.num_stages;
    out["stage_rows"] = plan.ring_plan.stage_rows;
    out["stage_bytes"] = plan.ring_plan.stage_bytes;
    return out;
}

}  // namespace

void bind_cuda_rows(nb::module_& module) {
    module.def("card_matmul_window", &matmul_window, "types"_a, "weights"_a, "x"_a, "residuals"_a, "shape"_a,
               "A list of float32 [rows, weight rows]: x float32 [rows, columns] . weights uint8 [weight rows, row bytes] of up to "
               "three matrices, plus their residuals. shape: (multiprocessors, shared bytes of a block, of a multiprocessor).");
    module.def("card_matmul_router", &matmul_router, "type_id"_a, "weights"_a, "x"_a, "residual"_a, "gamma"_a, "router"_a,
               "shape"_a,
               "(float32 [1, weight rows], int64 [1, experts]): one product of one row, and the sums of a router behind it.");
    module.def("card_norm_matmul_window", &norm_matmul_window, "types"_a, "weights"_a, "x"_a, "gamma"_a, "eps"_a, "shape"_a,
               "The same of the RMS norm of x.");
    module.def("card_embed", &embed, "type_id"_a, "table"_a, "columns"_a, "tokens"_a,
               "float32 [tokens, columns]: rows of a table uint8 [vocabulary, row bytes].");
    module.def("plan_products", &plan_products, "types"_a, "rows"_a, "columns"_a, "num_rows"_a, "with_norm"_a, "shape"_a,
               "How products of a window are cut into blocks and stages.");
}
