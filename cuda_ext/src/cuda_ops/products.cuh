// A warp's share of the weight rows of several matrices, as items of a StageRing.
#pragma once
#include "cuda_ops/matmul_window.h"
#include "cuda_ops/router_sum.cuh"
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
    bool is_last;  // of the warp
};

// Weight rows of a block whose products go on to a router.
__device__ __forceinline__ EvenShare router_rows(const Products& products, const ProductsPlan& plan) {
    const EvenShare groups = share_of(plan.block_groups, plan.block_rest, blockIdx.x);
    return {groups.begin * kRouterGroup, min(groups.end * kRouterGroup, products.product[0].weights.rows)};
}

__device__ __forceinline__ RouterOutput* router_outputs(const ProductsPlan& plan) {
    return reinterpret_cast<RouterOutput*>(device::dynamic_shared() + plan.outputs);
}

// Brings what the router wants for the block's rows on its way, before wait_prerequisites(). A barrier must come before the
// products, copy_async_wait() and another before add_router_sums().
__device__ __forceinline__ void fetch_router(const Products& products, const ProductsPlan& plan, int thread, int num_threads) {
    const EvenShare rows = router_rows(products, plan);
    const int num_experts = products.router.num_experts, num_units = (rows.end - rows.begin) * num_experts / 4;
    const auto* from = reinterpret_cast<const uint4*>(products.router.weights + static_cast<int64_t>(rows.begin) * num_experts);
    auto* to = reinterpret_cast<uint4*>(device::dynamic_shared() + plan.router);
    for (int i = thread; i < num_units; i += num_threads) device::copy_async16(to + i, from + i);
    device::copy_async_commit();
    for (int i = thread; i < rows.end - rows.begin; i += num_threads)
        router_outputs(plan)[i] = {__ldcg(products.product[0].residual + rows.begin + i),
                                   __ldg(products.router.gamma + rows.begin + i)};
}

// What the block's rows add to the router's sums.
__device__ __forceinline__ void add_router_sums(const Products& products, const ProductsPlan& plan, int thread, int num_threads) {
    const EvenShare rows = router_rows(products, plan);
    const int num_rows = rows.end - rows.begin, num_experts = products.router.num_experts;
    const RouterOutput* outputs = router_outputs(plan);
    const auto* weights = reinterpret_cast<const float*>(device::dynamic_shared() + plan.router);
    if (num_rows == 0) return;
#pragma unroll 1
    for (int expert = thread; expert < num_experts; expert += num_threads) {
        int64_t sum = 0;
#pragma unroll 1
        for (int group = 0; group < num_rows; group += kRouterGroup) {
            float dot = 0.0f;
#pragma unroll 8
            for (int i = group; i < min(group + kRouterGroup, num_rows); i++)
                dot = quant::fma(weights[i * num_experts + expert], outputs[i].value, dot);
            sum += router_whole(dot);
        }
        add_router_sum(products.router.sums + expert, sum);
    }
}

// T: as for quant::dot_window_rows.
template <class T>
class ProductItems {
  public:
    __device__ __forceinline__ ProductItems(const Products& products, const ProductsPlan& plan, int num_inputs, int warp)
        : products_(products), plan_(plan), num_inputs_(num_inputs), warp_(warp) {}

    // Before the first fetch().
    __device__ __forceinline__ void take_share(int lane) const {
        if (lane == 0) {
            const EvenShare rows = share();
            RowsLeft mine = {0, rows.begin, rows.end - rows.begin};
#pragma unroll 1
            while (mine.num_rows > 0 && mine.row >= products_.product[mine.product].weights.rows)
                mine.row -= products_.product[mine.product++].weights.rows;
            left() = mine;
        }
        __syncwarp();
    }

    __device__ __forceinline__ Fetched fetch(int, device::StagedCopy& copy, uint8_t* stage, int lane) const {
        const StageOfRows rows = next(lane);
        if (rows.num_rows == 0) return Fetched::none;
        if (lane == 0) note_of<Note>(stage) = {rows.product, rows.row, rows.num_rows, rows.span.offset};
        copy.start(stage, rows.span.start, rows.span.nbytes, lane);
        return rows.is_last ? Fetched::last : Fetched::more;
    }

    __device__ __forceinline__ void compute(const uint8_t* stage, int lane) const {
        const Note rows = note_of<Note>(stage);
        const Product& product = products_.product[rows.product];
        unsigned char* shared = device::dynamic_shared();
        quant::RowDots dots{};
        dots.weights = stage + rows.offset;
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
        const bool adds = product.residual && lane < num_inputs * rows.num_rows, routes = products_.router.weights;
        const int at = input * product.weights.rows + rows.row + lane - input * rows.num_rows;
        const float residual = adds && !routes ? __ldcg(product.residual + at) : 0.0f;
        if (product.residual) {
            dots.out = reinterpret_cast<float*>(shared + plan_.results) + warp_ * plan_.launch_rows * plan_.ring_plan.stage_rows;
            dots.out_stride = rows.num_rows;
        }
        const float* results = dots.out;
        quant::dot_window_rows<T>(product.weights.type, dots, lane);
        if (!product.residual) return;
        __syncwarp();
        if (adds && routes) {
            RouterOutput& output = router_outputs(plan_)[at - router_rows(products_, plan_).begin];
            const float sum = quant::add(output.value, results[lane]);
            product.out[at] = sum;
            output.value = quant::mul(sum, output.gamma);
        } else if (adds) {
            product.out[at] = quant::add(residual, results[lane]);
        }
        __syncwarp();
    }

    // Every item, one product after the other; after ring.fetch().
    __device__ __forceinline__ void run(StageRing& ring, int lane) const {
        if constexpr (!std::is_same_v<T, quant::EachType>) {
            ring.run(*this, lane);
        } else {
#pragma unroll 1
            while (!ring.is_done()) {
                const int product = note_of<Note>(ring.next_stage()).product;
                quant::with_type(products_.product[product].weights.type, [&]<class Own>() TANDEM_INLINE_BODY {
                    const auto is_of_product = [&](const uint8_t* stage) { return note_of<Note>(stage).product == product; };
                    ring.run_while(is_of_product, ProductItems<Own>(products_, plan_, num_inputs_, warp_), *this, lane);
                });
            }
        }
    }

  private:
    struct Note {
        int product;
        int row;
        int num_rows;
        uint32_t offset;  // of the rows in the stage
    };

    // All rows of all products, one after the other, are shared evenly among the warps of all blocks; neighbouring shares lie in
    // different blocks. With a router a block has whole groups, and its warps share those.
    __device__ __forceinline__ EvenShare share() const {
        if (!products_.router.weights) return share_of(plan_.share_rows, plan_.share_rest, warp_ * plan_.num_blocks + blockIdx.x);
        const EvenShare rows = router_rows(products_, plan_),
                        own = even_share(rows.end - rows.begin, warp_, plan_.ring_plan.num_warps);
        return {rows.begin + own.begin, rows.begin + own.end};
    }

    __device__ __forceinline__ RowsLeft& left() const {
        return reinterpret_cast<RowsLeft*>(device::dynamic_shared() + plan_.shares)[warp_];
    }

    // The next rows of the warp's share; beyond its last there are none.
    __device__ __forceinline__ StageOfRows next(int lane) const {
        const RowsLeft now = left();
        if (now.num_rows == 0) return {};
        const DeviceMatrix& weights = products_.product[now.product].weights;
        const int here = min(weights.rows - now.row, now.num_rows), num_rows = min(here, plan_.ring_plan.stage_rows);
        const bool ends = now.row + num_rows == weights.rows;  // the product
        __syncwarp();                                          // all lanes have read what is left
        if (lane == 0) left() = {now.product + ends, ends ? 0 : now.row + num_rows, now.num_rows - num_rows};
        __syncwarp();
        return {now.product, now.row, num_rows,
                device::aligned_span(weights.data + now.row * weights.row_bytes, num_rows * weights.row_bytes),
                num_rows == now.num_rows};
    }

    const Products& products_;
    const ProductsPlan& plan_;
    int num_inputs_;
    int warp_;
};

static_assert(kMaxWindowRows * 4 <= 32, "a lane takes one result of a stage");

// Instance<T>::kernel that multiplies one row by these products.
template <template <class> class Instance>
auto kernel_for(const Products& products) {
    const quant::Type type = products.product[0].weights.type;
    for (int i = 1; i < products.num_products; i++)
        if (products.product[i].weights.type != type) return Instance<quant::EachType>::kernel;
    return quant::kernel_of<Instance>(type);
}

// The code books of the products' types.
__device__ __forceinline__ void load_tables(const Products& products, const ProductsPlan& plan, int thread, int num_threads) {
    for (int i = 0; i < products.num_products; i++) {
        const quant::Type type = products.product[i].weights.type;
        const bool is_loaded = i > 0 && products.product[i - 1].weights.type == type;
        if (quant::table_bytes(type) > 0 && !is_loaded)
            quant::load_table(type, device::dynamic_shared() + plan.tables[i], thread, num_threads);
    }
}

}  // namespace tandem::cuda
