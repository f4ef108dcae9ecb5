// How products are cut into blocks, stages and launches.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "base/require.h"
#include "cuda_ops/matmul_window.h"
#include "cuda_ops/window_state.h"
#include "ops/activations.h"
#include "ops/router_sum.h"

namespace tandem::cuda {

namespace {

constexpr int64_t kMaxStageRows = 4;   // dot_rows is at its best with four rows at a time
constexpr int64_t kMaxSingleRows = 8;  // of a single stage, for one input row
constexpr int kLongRows = 16;          // of a warp
constexpr size_t kMarginBytes = 32;    // of a stage: copies begin and end at multiples of 16, dot products read 3 bytes beyond
constexpr size_t kSharedPercent = 48;  // of a multiprocessor's, so that the next kernel's blocks find room meanwhile

int64_t divide_up(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

void check(const Products& products, int num_rows) {
    require(num_rows >= 1 && num_rows <= kMaxWindowRows,
            "a window of " + std::to_string(num_rows) + " rows; 1 to " + std::to_string(kMaxWindowRows) + " are possible");
    require(
        products.num_products >= 1 && products.num_products <= kMaxProducts,
        std::to_string(products.num_products) + " products in one launch; 1 to " + std::to_string(kMaxProducts) + " are possible");
    const DeviceMatrix& first = products.product[0].weights;
    for (int i = 0; i < products.num_products; i++) {
        const DeviceMatrix& weights = products.product[i].weights;
        require(weights.columns == first.columns, "matrices of " + std::to_string(first.columns) + " and " +
                                                      std::to_string(weights.columns) + " columns do not have the same input");
        require(weights.rows > 0 && weights.columns > 0 && weights.columns % (quant::type_wants_values(weights.type) ? 4 : 32) == 0,
                "a matrix of " + std::to_string(weights.rows) + " rows of " + std::to_string(weights.columns) +
                    " values; columns are a multiple of 32, of floats one of 4");
        require(reinterpret_cast<uintptr_t>(weights.data) % 16 == 0, "a matrix does not begin at a multiple of 16 bytes");
    }
    require(!products.router.weights ||
                (num_rows == 1 && products.num_products == 1 && first.rows % 4 == 0 && products.product[0].residual != nullptr),
            "a router goes with one input row and one product that is added to a multiple of four values");
}

struct Shape {
    int64_t columns;
    int64_t num_weight_rows = 0;
    size_t row_bytes = 0;  // of the longest rows
    bool wants_groups = false;
    bool wants_values = false;
};

Shape shape_of(const Products& products) {
    Shape shape{products.product[0].weights.columns};
    for (int i = 0; i < products.num_products; i++) {
        const DeviceMatrix& weights = products.product[i].weights;
        shape.num_weight_rows += weights.rows;
        shape.row_bytes = std::max(shape.row_bytes, weights.row_bytes);
        (quant::type_wants_values(weights.type) ? shape.wants_values : shape.wants_groups) = true;
    }
    return shape;
}

// Of a block: where there are few rows, each block has some.
int useful_warps(const Shape& shape, int num_blocks) {
    return static_cast<int>(std::min<int64_t>(kWindowWarps, divide_up(shape.num_weight_rows, num_blocks)));
}

// The best rings that fit into `available` bytes: stages of up to kMaxStageRows rows, two of them at least where a warp needs more
// than one, and no more than it needs; else smaller stages, else fewer warps. num_warps is 0 where nothing fits.
RingPlan plan_product_rings(size_t available, int num_warps, int64_t num_weight_rows, size_t row_bytes, int num_blocks,
                            int64_t max_single_rows) {
    const auto rings = [&](int warps, int64_t rows) {
        const int64_t share = divide_up(num_weight_rows, int64_t{num_blocks} * warps), items = divide_up(share, rows);
        const size_t stage = kNoteBytes + (rows * row_bytes + 15) / 16 * 16 + kMarginBytes;
        const auto fitting = static_cast<int64_t>(stages_fitting(available / warps, stage));
        if (fitting < std::min<int64_t>(items, warps == num_warps ? 2 : 1)) return RingPlan{};
        const auto stages = static_cast<int32_t>(std::min({fitting, items, int64_t{kMaxStages}}));
        return RingPlan{warps, stages, static_cast<int32_t>(rows), static_cast<uint32_t>(stage),
                        static_cast<uint32_t>(ring_bytes(warps, stages, stage))};
    };
    const int64_t wanted = divide_up(num_weight_rows, int64_t{num_blocks} * num_warps);
    if (wanted <= max_single_rows)  // all that a warp has in one stage
        if (const RingPlan plan = rings(num_warps, wanted); plan.num_warps > 0) return plan;
    for (int64_t rows = std::min(kMaxStageRows, wanted); rows >= 1; rows -= rows > 2 ? 2 : 1)
        if (const RingPlan plan = rings(num_warps, rows); plan.num_warps > 0) return plan;
    for (int warps = num_warps / 2; warps >= 1; warps /= 2)
        if (const RingPlan plan = rings(warps, 1); plan.num_warps > 0) return plan;
    return {};
}

// The plan for `num_rows` rows a launch; its ring has no warps where they do not fit.
ProductsPlan plan_launch(const Products& products, const Shape& shape, int num_rows, bool with_norm, int num_blocks, bool is_long,
                         size_t limit) {
    const size_t value_bytes = shape.columns * sizeof(float);
    ProductsPlan plan{};
    plan.num_blocks = num_blocks;
    plan.launch_rows = num_rows;
    plan.wants_groups = shape.wants_groups;
    plan.wants_values = shape.wants_values;
    SharedPieces pieces;
    plan.groups = pieces.take(shape.wants_groups ? num_rows * groups_of(shape.columns) * sizeof(quant::ActGroup) : 0);
    plan.values = pieces.take(shape.wants_values ? num_rows * value_bytes : 0);
    plan.scratch = shape.wants_values ? plan.values : pieces.take(with_norm ? value_bytes : 0);
    plan.inverse = pieces.take(sizeof(float));
    plan.is_long = is_long;
    plan.shares = pieces.take(kWindowWarps * sizeof(RowsLeft));
    for (int i = 0; i < products.num_products; i++) {
        plan.tables[i] = pieces.take(quant::table_bytes(products.product[i].weights.type));
        for (int j = 0; j < i; j++)
            if (products.product[j].weights.type == products.product[i].weights.type) plan.tables[i] = plan.tables[j];
    }
    plan.results =
        pieces.take(kWindowWarps * num_rows * std::max(kMaxStageRows, num_rows == 1 ? kMaxSingleRows : 0) * sizeof(float));
    if (const RouterTail& router = products.router; router.weights) {
        const int64_t groups = router_groups(shape.num_weight_rows), rows = divide_up(groups, num_blocks) * kRouterGroup;
        plan.block_groups = static_cast<int32_t>(groups / num_blocks);
        plan.block_rest = static_cast<int32_t>(groups % num_blocks);
        plan.outputs = pieces.take(rows * sizeof(RouterOutput));
        plan.router = pieces.take(rows * router.num_experts * sizeof(float));
    }
    plan.rings = pieces.take(0);
    if (plan.rings >= limit) return plan;
    plan.ring_plan = plan_product_rings(limit - plan.rings, useful_warps(shape, num_blocks), shape.num_weight_rows, shape.row_bytes,
                                        num_blocks, num_rows == 1 ? kMaxSingleRows : 0);
    plan.shared_bytes = plan.rings + plan.ring_plan.nbytes;
    if (const int64_t warps = int64_t{num_blocks} * plan.ring_plan.num_warps; warps > 0) {
        plan.share_rows = static_cast<int32_t>(shape.num_weight_rows / warps);
        plan.share_rest = static_cast<int32_t>(shape.num_weight_rows % warps);
    }
    return plan;
}

}  // namespace

Products rows_from(Products products, int first) {
    for (int i = 0; i < products.num_products; i++) {
        Product& product = products.product[i];
        const int64_t values = int64_t{first} * product.weights.rows;
        product.out += values;
        if (product.residual) product.residual += values;
    }
    return products;
}

ProductsPlan plan_products(const Products& products, int num_rows, bool with_norm, const CardShape& card) {
    check(products, num_rows);
    require(!with_norm || num_rows == 1, "the norm of several rows is not made beside their products");
    const Shape shape = shape_of(products);
    // A kernel that runs for long gains more from memory than from the next one's blocks beside it.
    const bool is_long = shape.num_weight_rows > int64_t{kLongRows} * card.num_window_blocks() * kWindowWarps;
    const size_t modest = is_long ? card.block_shared_bytes : card.modest_shared_bytes(kSharedPercent);
    for (const size_t limit : {modest, card.block_shared_bytes}) {
        const ProductsPlan plan = plan_launch(products, shape, num_rows, with_norm, card.num_window_blocks(), is_long, limit);
        if (plan.ring_plan.num_warps == useful_warps(shape, card.num_window_blocks())) return plan;
    }
    for (int rows = num_rows; rows >= 1; rows--) {
        const ProductsPlan plan =
            plan_launch(products, shape, rows, with_norm, card.num_window_blocks(), is_long, card.block_shared_bytes);
        if (plan.ring_plan.num_warps > 0 && (rows == 1 || plan.ring_plan.num_warps > 1)) return plan;
    }
    throw std::invalid_argument("weight rows of " + std::to_string(shape.row_bytes) + " bytes and an input row of " +
                                std::to_string(shape.columns) + " values do not fit the " +
                                std::to_string(card.block_shared_bytes) + " bytes of shared memory");
}

}  // namespace tandem::cuda
