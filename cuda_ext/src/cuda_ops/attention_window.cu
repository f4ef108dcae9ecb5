#include "cuda_ops/attention_window.h"

#include <algorithm>
#include <bit>

#include "base/require.h"
#include "cuda_ops/attention_window_kernel.cuh"
#include "device/launch.h"

namespace tandem::cuda {

namespace {

WindowKernel kernel_of(const KvLayer& kv, int num_queries) {
    switch (kv.type) {
        case KvType::f32:
            return window_kernel<float, 0>(num_queries);
        case KvType::f16:
            return window_kernel<__half>(kv.head_dim, num_queries);
        case KvType::int8:
            return int8_window_kernel(kv.head_dim, num_queries);
    }
    throw std::invalid_argument("the key/value cache has a type that is not known");
}

bool has_own_kernels(const KvLayer& kv) {
    return kv.type != KvType::f32 && std::has_single_bit(static_cast<unsigned>(kv.head_dim));
}

void check(const AttentionWindowProblem& p) {
    const int dim = p.kv.head_dim;
    require(dim % 32 == 0 && dim >= 64 && dim <= kMaxHeadDim, "heads of " + std::to_string(dim) + " values are not supported; " +
                                                                  "multiples of 32 from 64 to " + std::to_string(kMaxHeadDim) +
                                                                  " are");
    require(p.num_rows >= 1 && p.num_rows <= kMaxWindowRows, "a window has 1 to 8 rows, not " + std::to_string(p.num_rows));
    require(p.query_heads % p.kv.num_heads == 0 && p.query_heads / p.kv.num_heads <= kMaxGroupHeads,
            std::to_string(p.query_heads) + " query heads on " + std::to_string(p.kv.num_heads) +
                " key/value heads are not supported; up to " + std::to_string(kMaxGroupHeads) + " may share one");
}

int power_of_two(int x) {
    return static_cast<int>(std::bit_ceil(static_cast<unsigned>(x)));
}

void set_part(const AttentionWindowProblem& p, int part_heads, AttentionWindowPlan& plan) {
    const int group = p.query_heads / p.kv.num_heads;
    plan.num_parts = (group + part_heads - 1) / part_heads;
    plan.part_heads = (group + plan.num_parts - 1) / plan.num_parts;
    plan.num_queries = power_of_two(p.num_rows) * power_of_two(plan.part_heads);
    if (!has_own_kernels(p.kv)) plan.num_queries = plan.num_queries <= kFewQueries ? kFewQueries : kMaxQueries;
}

void set_chunk(const AttentionWindowProblem& p, int chunk_tiles, AttentionWindowPlan& plan) {
    plan.chunk_tiles = chunk_tiles;
    plan.shared_bytes = WindowShared::of(plan.num_queries, p.num_rows, p.kv.head_dim, chunk_tiles, p.kv.type).nbytes;
}

}  // namespace

// Few spans: query heads are spread over blocks until the card is full, and a whole span is fetched before the wait. Many spans:
// all heads of a row in one block, half a span at a time, so that several blocks of a multiprocessor take turns.
AttentionWindowPlan plan_attention_window(const AttentionWindowProblem& p, const AttentionWindowShape& shape) {
    check(p);
    const int64_t cells = shape.usual_spans * p.kv.num_heads, cards = shape.num_multiprocessors;
    const int group = p.query_heads / p.kv.num_heads;
    const auto wanted_parts = static_cast<int>(std::clamp<int64_t>((cards + cells - 1) / cells, 1, group));
    AttentionWindowPlan plan{};
    set_part(p, std::clamp((group + wanted_parts - 1) / wanted_parts, 1, kMaxQueries / power_of_two(p.num_rows)), plan);
    set_chunk(p, cells * plan.num_parts > 2 * cards ? kSpanTiles / 2 : kSpanTiles, plan);
    while (plan.shared_bytes > shape.shared_bytes && plan.chunk_tiles > 1) set_chunk(p, plan.chunk_tiles / 2, plan);
    while (plan.shared_bytes > shape.shared_bytes && plan.part_heads > 1) {
        set_part(p, (plan.part_heads + 1) / 2, plan);
        set_chunk(p, 1, plan);
    }
    require(plan.shared_bytes <= shape.shared_bytes,
            "attention over heads of " + std::to_string(p.kv.head_dim) + " values needs " + std::to_string(plan.shared_bytes) +
                " bytes of shared memory; this card has " + std::to_string(shape.shared_bytes));
    const int64_t columns = int64_t{p.kv.num_heads} * plan.num_parts;
    const int64_t room = cards * std::max<int64_t>(1, static_cast<int64_t>(shape.shared_bytes / plan.shared_bytes));
    const int64_t rounds = std::max<int64_t>(1, (shape.usual_spans * columns + room - 1) / room);
    plan.span_blocks = static_cast<int>((shape.usual_spans + rounds - 1) / rounds);
    return plan;
}

void attention_window(const AttentionWindowProblem& p, const AttentionWindowPlan& plan, bool dependent, cudaStream_t stream) {
    const int heads_shift = std::countr_zero(static_cast<unsigned>(power_of_two(plan.part_heads)));
    const WindowArguments arguments{p, plan.part_heads, plan.num_parts, heads_shift, plan.chunk_tiles};
    const dim3 grid(static_cast<unsigned>(p.kv.num_heads * plan.num_parts), static_cast<unsigned>(plan.span_blocks));
    const dim3 threads(static_cast<unsigned>(kWarpLanes * kWarpsPerTile * plan.chunk_tiles));
    device::launch({grid, threads, plan.shared_bytes, stream, dependent}, kernel_of(p.kv, plan.num_queries), arguments);
}

}  // namespace tandem::cuda
