// A warp's share of the weight rows of several matrices, as items of a StageRing.
#pragma once
#include "cuda_ops/matmul_window.h"
#include "cuda_ops/stage_ring.cuh"
#include "cuda_ops/window_state.h"
#include "device/primitives.cuh"
#include "quant/row_one.cuh"

namespace tandem::cuda {

// Rows of one product that lie in one stage.
struct StageOfRows {
    int product;
    int row;
    int num_rows;
    device::AlignedSpan span;
};

template <bool kOneRow>
class ProductItems {
  public:
    // All rows of all products, one after the other, are shared evenly among the warps of all blocks; neighbouring shares lie in
    // different blocks.
    __device__ __forceinline__ ProductItems(const Products& products, const ProductsPlan& plan, int num_inputs, int warp)
        : products_(products), plan_(plan), num_inputs_(num_inputs), warp_(warp) {
        const EvenShare share = share_of(plan.share_rows, plan.share_rest, warp * plan.num_blocks + blockIdx.x);
        fetched_ = computed_ = share.begin;
        end_ = share.end;
    }

    __device__ __forceinline__ bool fetch(device::StagedCopy& copy, uint8_t* stage, int lane) {
        if (fetched_ >= end_) return false;
        const StageOfRows rows = at(fetched_);
        copy.start(stage, rows.span.start, rows.span.nbytes, lane);
        fetched_ += rows.num_rows;
        return true;
    }

    __device__ __forceinline__ void compute(const uint8_t* stage, int lane) {
        const StageOfRows rows = at(computed_);
        computed_ += rows.num_rows;
        const Product& product = products_.product[rows.product];
        unsigned char* shared = device::dynamic_shared();
        quant::RowDots dots{};
        dots.weights = stage + rows.span.offset;
        dots.row_bytes = static_cast<uint32_t>(product.weights.row_bytes);
        dots.num_rows = rows.num_rows;
        dots.columns = product.weights.columns;
        dots.num_inputs = num_inputs_;
        dots.groups = reinterpret_cast<const quant::SharedGroup*>(shared + plan_.groups);
        dots.values = reinterpret_cast<const float*>(shared + plan_.values);
        dots.table = shared + plan_.tables[rows.product];
        dots.out = product.out + rows.row;
        dots.out_stride = product.weights.rows;
        // Residuals are on their way while the rows are computed.
        const int num_inputs = kOneRow ? 1 : num_inputs_, input = kOneRow ? 0 : small_quotient(lane, rows.num_rows);
        const bool adds = product.residual && lane < num_inputs * rows.num_rows;
        const int at = input * product.weights.rows + rows.row + lane - input * rows.num_rows;
        const float residual = adds ? __ldcg(product.residual + at) : 0.0f;
        if (product.residual) {
            dots.out = reinterpret_cast<float*>(shared + plan_.results) + warp_ * plan_.launch_rows * plan_.ring_plan.stage_rows;
            dots.out_stride = rows.num_rows;
        }
        const float* results = dots.out;
        quant::dot_window_rows<kOneRow>(product.weights.type, dots, lane);
        if (!product.residual) return;
        __syncwarp();
        if (adds) product.out[at] = quant::add(residual, results[lane]);
        __syncwarp();
    }

  private:
    __device__ __forceinline__ StageOfRows at(int position) const {
        int product = 0, row = position;
        while (row >= products_.product[product].weights.rows) row -= products_.product[product++].weights.rows;
        const DeviceMatrix& weights = products_.product[product].weights;
        const int num_rows = min(min(plan_.ring_plan.stage_rows, weights.rows - row), end_ - position);
        return {product, row, num_rows, device::aligned_span(weights.data + row * weights.row_bytes, num_rows * weights.row_bytes)};
    }

    const Products& products_;
    const ProductsPlan& plan_;
    int num_inputs_;
    int warp_;
    int fetched_;  // position in all rows
    int computed_;
    int end_;
};

static_assert(kMaxWindowRows * 4 <= 32, "a lane takes one result of a stage");

// The code books of the products' types.
__device__ __forceinline__ void load_tables(const Products& products, const ProductsPlan& plan, int thread, int num_threads) {
    for (int i = 0; i < products.num_products; i++)
        if (quant::table_bytes(products.product[i].weights.type) > 0 && (i == 0 || plan.tables[i] != plan.tables[i - 1]))
            quant::load_table(products.product[i].weights.type, device::dynamic_shared() + plan.tables[i], thread, num_threads);
}

}  // namespace tandem::cuda
