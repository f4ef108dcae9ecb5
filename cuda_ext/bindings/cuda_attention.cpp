// Attention on a card, for tests and measurements: one layer's cache and the operations on it.
#include <cuda_runtime.h>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <optional>

#include "base/require.h"
#include "cuda_arrays.h"
#include "cuda_ops/attention_prompt.h"
#include "cuda_ops/attention_window.h"
#include "cuda_ops/rotary.h"
#include "device/check.h"
#include "ops/activations.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace tandem;
using bindings::CardArray;

namespace {

template <class T, class... Shape>
using In = nb::ndarray<const T, Shape..., nb::c_contig, nb::device::cpu>;
using FloatRows = In<float, nb::ndim<2>>;
using MaybeVector = std::optional<In<float, nb::ndim<1>>>;
// One launch; where `num` is not 0, `num` more in a row, of which one takes the returned microseconds.
template <class Launch>
double launches(int num, Launch launch) {
    cudaEvent_t begin, end;
    CUDA_CHECK(cudaEventCreate(&begin));
    CUDA_CHECK(cudaEventCreate(&end));
    launch(false);
    CUDA_CHECK(cudaEventRecord(begin, nullptr));
    for (int i = 0; i < num; i++) launch(true);
    CUDA_CHECK(cudaEventRecord(end, nullptr));
    CUDA_CHECK(cudaDeviceSynchronize());
    float ms = 0;
    CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    return num > 0 ? ms * 1e3 / num : 0.0;
}

// The rows of one call on the card.
struct CardRows {
    CardArray query, key, value;
    int num_rows;

    CardRows(const FloatRows& query, const FloatRows& key, const FloatRows& value)
        : query(query.data(), query.nbytes()),
          key(key.data(), key.nbytes()),
          value(value.data(), value.nbytes()),
          num_rows(static_cast<int>(query.shape(0))) {}
};

constexpr int kSums = 37;  // of a row

class CudaAttention {
  public:
    CudaAttention(int query_heads, int kv_heads, int head_dim, int64_t context, KvType type, const MaybeVector& query_gamma,
                  const MaybeVector& key_gamma, float eps, float scale, const FloatRows& angles)
        : query_heads_(query_heads),
          eps_(eps),
          scale_(scale),
          angles_(angles.data(), angles.nbytes()),
          state_(sizeof(cuda::WindowState)),
          counters_(query_heads * sizeof(uint32_t)),
          cache_(cache_bytes(kv_heads, head_dim, context, type)) {
        require(angles.shape(0) == static_cast<size_t>(context) && angles.shape(1) == static_cast<size_t>(head_dim),
                "angles must be [context, head_dim]");
        if (query_gamma) query_gamma_.emplace(query_gamma->data(), query_gamma->nbytes());
        if (key_gamma) key_gamma_.emplace(key_gamma->data(), key_gamma->nbytes());
        kv_ = {type,
               kv_heads,
               head_dim,
               (context + kKvTile - 1) / kKvTile,
               cache_.as<std::byte>(),
               cache_.as<std::byte>() + cache_.nbytes() / 2};
        num_spans_ = (context + kSpan - 1) / kSpan;
        CUDA_CHECK(cudaMemset(counters_.data(), 0, counters_.nbytes()));
    }

    nb::ndarray<nb::numpy, uint8_t> cache() { return cache_.numpy<uint8_t>({cache_.nbytes()}); }
    void set_cache(const In<uint8_t, nb::ndim<1>>& bytes) {
        require(bytes.size() == cache_.nbytes(), "the cache has " + std::to_string(cache_.nbytes()) + " bytes");
        CUDA_CHECK(cudaMemcpy(cache_.data(), bytes.data(), bytes.size(), cudaMemcpyHostToDevice));
    }

    nb::tuple window(const FloatRows& query, const FloatRows& key, const FloatRows& value, int64_t position,
                     const cuda::AttentionWindowShape& shape, int num_launches) {
        check(query, key, value);
        CardRows rows(query, key, value);
        CardArray out(query.nbytes()), groups(query.shape(0) * groups_of(width()) * sizeof(quant::ActGroup));
        CardArray sums(rows.num_rows * kSums * sizeof(int64_t));
        CardArray spans(cuda::attention_window_floats(rows.num_rows, query_heads_, num_spans_, kv_.head_dim) * sizeof(float));
        set_position(position, rows.num_rows);
        const cuda::AttentionWindowProblem problem{state_.as<cuda::WindowState>(),
                                                   rows.num_rows,
                                                   rows.query.as<float>(),
                                                   rows.key.as<float>(),
                                                   rows.value.as<float>(),
                                                   query_heads_,
                                                   gamma(query_gamma_),
                                                   gamma(key_gamma_),
                                                   eps_,
                                                   angles_.as<float2>(),
                                                   kv_,
                                                   scale_,
                                                   spans.as<float>(),
                                                   counters_.as<uint32_t>(),
                                                   num_spans_,
                                                   out.as<float>(),
                                                   groups.as<quant::ActGroup>(),
                                                   sums.as<int64_t>(),
                                                   kSums};
        const cuda::AttentionWindowPlan plan = plan_attention_window(problem, shape);
        const double us = launches(num_launches, [&](bool again) { attention_window(problem, plan, again, nullptr); });
        check_counters();
        for (const uint8_t byte : sums.read()) require(byte == 0, "the sums of the router were not cleared");
        return nb::make_tuple(
            out.numpy<float>({query.shape(0), query.shape(1)}),
            groups.numpy<uint8_t>({query.shape(0), static_cast<size_t>(groups_of(width())), sizeof(quant::ActGroup)}),
            nb::make_tuple(plan.part_heads, plan.num_parts, plan.chunk_tiles, plan.span_blocks), us);
    }

    nb::tuple rotary(const FloatRows& query, const FloatRows& key, const FloatRows& value, int64_t position) {
        check(query, key, value);
        CardRows rows(query, key, value);
        CardArray turned(query.nbytes()), halves(query.nbytes() / 2);
        const cuda::RotaryPromptProblem problem{rows.query.as<float>(),
                                                rows.key.as<float>(),
                                                rows.value.as<float>(),
                                                query_heads_,
                                                gamma(query_gamma_),
                                                gamma(key_gamma_),
                                                eps_,
                                                angles_.as<float2>(),
                                                kv_,
                                                turned.as<float>(),
                                                halves.as<uint16_t>()};
        cuda::rotary(problem, position, rows.num_rows, nullptr);
        CUDA_CHECK(cudaDeviceSynchronize());
        return nb::make_tuple(turned.numpy<float>({query.shape(0), query.shape(1)}),
                              halves.numpy<uint16_t>({query.shape(0), query.shape(1)}));
    }

    nb::tuple prompt(const In<uint16_t, nb::ndim<2>>& query, int64_t position, int num_launches) {
        require(query.shape(1) == static_cast<size_t>(width()), "query must be [rows, query_heads * head_dim]");
        CardArray halves(query.data(), query.nbytes()), out(2 * query.nbytes());
        const cuda::AttentionPromptProblem problem{halves.as<uint16_t>(), query_heads_, kv_, scale_, out.as<float>()};
        const int num_rows = static_cast<int>(query.shape(0));
        const double us = launches(num_launches, [&](bool) { attention_prompt(problem, position, num_rows, nullptr); });
        return nb::make_tuple(out.numpy<float>({query.shape(0), query.shape(1)}), us);
    }

  private:
    static size_t cache_bytes(int kv_heads, int head_dim, int64_t context, KvType type) {
        const size_t tiles = static_cast<size_t>((context + kKvTile - 1) / kKvTile);
        return 2 * static_cast<size_t>(kv_heads) * tiles * kv_tile_bytes(type, head_dim);
    }

    static const float* gamma(std::optional<CardArray>& values) { return values ? values->as<float>() : nullptr; }
    int64_t width() const { return int64_t{query_heads_} * kv_.head_dim; }

    void set_position(int64_t position, int num_rows) {
        cuda::WindowState state{};
        state.position = position;
        state.num_rows = num_rows;
        CUDA_CHECK(cudaMemcpy(state_.data(), &state, sizeof(state), cudaMemcpyHostToDevice));
    }

    void check(const FloatRows& query, const FloatRows& key, const FloatRows& value) const {
        const auto wide = static_cast<size_t>(width()), narrow = static_cast<size_t>(kv_.num_heads) * kv_.head_dim;
        require(query.shape(1) == wide && key.shape(1) == narrow && value.shape(1) == narrow && query.shape(0) == key.shape(0) &&
                    query.shape(0) == value.shape(0),
                "query, key and value must be [rows, heads * head_dim]");
    }

    void check_counters() {
        const std::vector<uint8_t> bytes = counters_.read();
        require(std::count(bytes.begin(), bytes.end(), 0) == static_cast<int64_t>(bytes.size()), "counters were not reset");
    }

    int query_heads_;
    float eps_, scale_;
    CardArray angles_;
    std::optional<CardArray> query_gamma_, key_gamma_;
    CardArray state_, counters_, cache_;
    KvLayer kv_;
    int64_t num_spans_;
};

}  // namespace

void bind_cuda_attention(nb::module_& module) {
    nb::class_<cuda::AttentionWindowShape>(module, "AttentionWindowShape",
                                           "The card and the contexts that a window's attention is cut for.")
        .def(
            "__init__",
            [](cuda::AttentionWindowShape* self, int num_multiprocessors, size_t shared_bytes, int64_t usual_spans) {
                new (self) cuda::AttentionWindowShape{num_multiprocessors, shared_bytes, usual_spans};
            },
            "num_multiprocessors"_a, "shared_bytes"_a, "usual_spans"_a);
    nb::class_<CudaAttention>(module, "CudaAttention",
                              "One layer's cache on the current card and the attention over it; for tests.")
        .def(nb::init<int, int, int, int64_t, KvType, const MaybeVector&, const MaybeVector&, float, float, const FloatRows&>(),
             "query_heads"_a, "kv_heads"_a, "head_dim"_a, "context"_a, "kv_type"_a, "query_gamma"_a.none(), "key_gamma"_a.none(),
             "eps"_a, "scale"_a, "angles"_a)
        .def("cache", &CudaAttention::cache, "Keys, then values.")
        .def("set_cache", &CudaAttention::set_cache, "bytes"_a)
        .def("window", &CudaAttention::window, "query"_a, "key"_a, "value"_a, "position"_a, "shape"_a, "num_launches"_a = 0,
             "(out, groups, (part_heads, num_parts, chunk_tiles, span_blocks), microseconds of a launch).")
        .def("rotary", &CudaAttention::rotary, "query"_a, "key"_a, "value"_a, "position"_a,
             "(rotated queries, the same as halves).")
        .def("prompt", &CudaAttention::prompt, "query"_a, "position"_a, "num_launches"_a = 0, "(out, microseconds of a launch).");
}
