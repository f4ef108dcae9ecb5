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

// T: as for quant::dot_window_rows.
template <class T>
class ProductItems {
  public:
    __device__ __forceinline__ ProductItems(const Products& products, const ProductsPlan& plan, int num_inputs, int warp)
        : products_(products), plan_(plan), num_inputs_(num_inputs), warp_(warp) {}

    __device__ __forceinline__ bool fetch(int item, device::StagedCopy& copy, uint8_t* stage, int lane) const {
        const StageOfRows rows = at(item);
        if (rows.num_rows == 0) return false;
        copy.start(stage, rows.span.start, rows.span.nbytes, lane);
        return true;
    }

    __device__ __forceinline__ void compute(int item, const uint8_t* stage, int lane) const {
        const StageOfRows rows = at(item);
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
        const int num_inputs = quant::kOneRow<T> ? 1 : num_inputs_,
                  input = quant::kOneRow<T> ? 0 : small_quotient(lane, rows.num_rows);
        const bool adds = product.residual && lane < num_inputs * rows.num_rows;
        const int at = input * product.weights.rows + rows.row + lane - input * rows.num_rows;
        const float residual = adds ? __ldcg(product.residual + at) : 0.0f;
        if (product.residual) {
            dots.out = reinterpret_cast<float*>(shared + plan_.results) + warp_ * plan_.launch_rows * plan_.ring_plan.stage_rows;
            dots.out_stride = rows.num_rows;
        }
        const float* results = dots.out;
        quant::dot_window_rows<T>(product.weights.type, dots, lane);
        if (!product.residual) return;
        __syncwarp();
        if (adds) product.out[at] = quant::add(residual, results[lane]);
        __syncwarp();
    }

    // Every item, one product after the other; after ring.fetch().
    __device__ __forceinline__ void run(StageRing& ring, int lane) const {
        if constexpr (!std::is_same_v<T, quant::EachType>) {
            ring.run(*this, lane);
        } else {
#pragma unroll 1
            while (!ring.is_done()) {
                const int product = at(ring.num_computed()).product, end = end_of(product);
                quant::with_type(products_.product[product].weights.type, [&]<class Own>() {
                    ring.run_until(end, ProductItems<Own>(products_, plan_, num_inputs_, warp_), *this, lane);
                });
            }
        }
    }

  private:
    // All rows of all products, one after the other, are shared evenly among the warps of all blocks; neighbouring shares lie in
    // different blocks.
    __device__ __forceinline__ EvenShare share() const {
        return share_of(plan_.share_rows, plan_.share_rest, warp_ * plan_.num_blocks + blockIdx.x);
    }

    // Beyond the warp's last item there are no rows.
    __device__ __forceinline__ StageOfRows at(int item) const {
        const int stage_rows = plan_.ring_plan.stage_rows;
        int row = share().begin, left = share().end - row;
#pragma unroll 1
        for (int product = 0; left > 0; product++) {
            const DeviceMatrix& weights = products_.product[product].weights;
            const int here = min(weights.rows - row, left), skipped = item * stage_rows;
            if (skipped < here) {
                row += skipped;
                const int num_rows = min(stage_rows, here - skipped);
                return {product, row, num_rows,
                        device::aligned_span(weights.data + row * weights.row_bytes, num_rows * weights.row_bytes)};
            }
            row = max(0, row - weights.rows);
            if (here <= 0) continue;
            left -= here;
            if (left > 0) item -= (here + stage_rows - 1) / stage_rows;
        }
        return {};
    }

    // The number of the first item behind those of a product.
    __device__ __forceinline__ int end_of(int product) const {
        int row = share().begin, left = share().end - row, end = 0;
#pragma unroll 1
        for (int i = 0; i <= product; i++) {
            const int rows = products_.product[i].weights.rows, here = min(rows - row, left);
            row = max(0, row - rows);
            if (here <= 0) continue;
            left -= here;
            if (left == 0) return kEveryItem;
            end += (here + plan_.ring_plan.stage_rows - 1) / plan_.ring_plan.stage_rows;
        }
        return end;
    }

    const Products& products_;
    const ProductsPlan& plan_;
    int num_inputs_;
    int warp_;
};

static_assert(kMaxWindowRows * 4 <= 32, "a lane takes one result of a stage");

// Instance<T>::kernel that multiplies `num_rows` rows by these products.
template <template <class> class Instance>
auto kernel_for(const Products& products, int num_rows) {
    if (num_rows > 1) return Instance<quant::AnyType>::kernel;
    const quant::Type type = products.product[0].weights.type;
    for (int i = 1; i < products.num_products; i++)
        if (products.product[i].weights.type != type) return Instance<quant::EachType>::kernel;
    return quant::kernel_of<Instance>(type);
}

// The code books of the products' types.
__device__ __forceinline__ void load_tables(const Products& products, const ProductsPlan& plan, int thread, int num_threads) {
    for (int i = 0; i < products.num_products; i++)
        if (quant::table_bytes(products.product[i].weights.type) > 0 && (i == 0 || plan.tables[i] != plan.tables[i - 1]))
            quant::load_table(products.product[i].weights.type, device::dynamic_shared() + plan.tables[i], thread, num_threads);
}

}  // namespace tandem::cuda
