// Products of matrices and a window's rows on the card: out[row, r] = weight row r . input row `row`, residuals added last; the
// bits of ops/matmul.h.
//
// norm_matmul_window.h multiplies the norm of rows, this one rows that are quantised already. One launch: warps of all
// multiprocessors share the weight rows of all products evenly and fetch theirs through rings of stages in shared memory, the
// first ones before wait_prerequisites().
#pragma once
#include <cuda_runtime.h>

#include "cuda_ops/experts_window.h"
#include "cuda_ops/matrix.h"
#include "quant/row.h"
#include "quant/table_bytes.h"

namespace tandem::cuda {

constexpr int kMaxProducts = 3;

struct Product {
    DeviceMatrix weights;
    float* out;             // [rows of the window, weights.rows]
    const float* residual;  // the same, may be `out`; or null
};

// A router over the rows that a product makes: adds to its sums (ops/router_sum.h), which are zero. The product's residual is
// complete before the kernel before this one starts.
struct RouterTail {
    const float* gamma;    // [width], of the norm before the router
    const float* weights;  // [width, experts]; null: there is no router
    int64_t* sums;         // [experts]
    int32_t num_experts;
};

// Of a row of the product, in shared memory.
struct RouterOutput {
    float value;  // of the residual; then of the output, times gamma
    float gamma;
};

// Matrices of any types over the same input rows.
struct Products {
    int32_t num_products;  // 1..kMaxProducts
    Product product[kMaxProducts];
    RouterTail router;  // only for one input row and one product, which has a residual
};

// The same products for the rows of the window from `first` on.
Products rows_from(Products products, int first);

struct MatmulWindowProblem {
    int32_t num_rows;               // 1..8
    const quant::ActGroup* groups;  // [rows, groups of the columns]; null where no matrix is quantised
    const float* values;            // [rows, columns], 16-byte aligned; null where no matrix wants floats
    Products products;
};

// Weight rows, of one product after the other, that a warp has yet to fetch.
struct RowsLeft {
    int product;  // of the first row
    int row;
    int num_rows;
};

// How a launch is cut, and offsets into a block's shared memory.
struct ProductsPlan {
    int32_t num_blocks;
    int32_t launch_rows;   // rows of the window that one launch takes; more rows are more launches
    int32_t share_rows;    // weight rows of a warp, of all products together;
    int32_t share_rest;    // of so many warps, one more
    int32_t block_groups;  // with a router: groups of kRouterGroup weight rows of a block;
    int32_t block_rest;    // of so many blocks, one more
    bool wants_groups;
    bool wants_values;
    uint32_t groups;
    uint32_t values;
    uint32_t scratch;  // of the norm: float [columns]; `values` where there are some
    uint32_t inverse;
    bool is_long;     // takes a multiprocessor's memory, so that no other block can run there
    uint32_t shares;  // RowsLeft [warps]
    uint32_t tables[kMaxProducts];
    uint32_t results;  // float [warps, launch_rows, stage_rows]
    uint32_t outputs;  // with a router: RouterOutput [rows of a block]
    uint32_t router;   // and its weights of these rows, [rows of a block, experts]
    uint32_t rings;
    uint32_t shared_bytes;
    RingPlan ring_plan;
};

// A pure function. `with_norm`: of one row. Throws std::invalid_argument where the matrices do not fit together, or one row of each
// kind does not fit the card's shared memory, with the router's part if there is one.
ProductsPlan plan_products(const Products& products, int num_rows, bool with_norm, const CardShape& card);

void matmul_window(const MatmulWindowProblem& problem, const CardShape& card, bool dependent, cudaStream_t stream);

}  // namespace tandem::cuda
