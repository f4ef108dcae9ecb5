#include "cards/cuda_recorder.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "base/require.h"
#include "cuda_ops/route_prompt.h"
#include "cuda_ops/window_state.h"
#include "ops/attention.h"

namespace tandem {

namespace {

constexpr size_t kAlignment = 256;

size_t aligned(size_t nbytes) {
    return (nbytes + kAlignment - 1) / kAlignment * kAlignment;
}

// Rows that are `pairs` long are carved behind each other.
class Carver {
  public:
    explicit Carver(const View& memory) : memory_(memory) {}

    template <class T>
    T* take(int64_t num) {
        const size_t offset = used_;
        used_ += aligned(num * sizeof(T));
        return reinterpret_cast<T*>(memory_.data() + offset);
    }
    void check(const char* what) const {
        require(used_ <= memory_.nbytes, std::string(what) + ": " + std::to_string(used_) + " bytes are needed, but there are " +
                                             std::to_string(memory_.nbytes));
    }

  private:
    const View& memory_;
    size_t used_ = 0;
};

}  // namespace

CudaRecorder::CudaRecorder(std::shared_ptr<CudaProgram> program, View ring)
    : program_(std::move(program)), ring_memory_(std::move(ring)) {
    require(program_ != nullptr, "a recorder needs a program");
}

template <class T>
T* CudaRecorder::part(const View& view, int64_t num, const char* what) {
    require(!view.empty() && view.nbytes >= num * sizeof(T), std::string(what) + ": " + std::to_string(num * sizeof(T)) +
                                                                 " bytes are needed, but there are " + std::to_string(view.nbytes));
    program_->keep(view);
    return view.as<T>();
}

int64_t CudaRecorder::most(Rows rows) const {
    return rows == Rows::all ? program_->limits().max_rows : program_->limits().max_logits;
}

cuda::HalfRows CudaRecorder::half_rows(const RowsMemory& rows, int64_t num_rows, const char* what) {
    require(!rows.groups.empty(), std::string(what) + ": rows of " + std::to_string(rows.width) + " values cannot be quantised");
    program_->keep(rows.groups);
    Carver carver(rows.groups);
    auto* values = carver.take<uint16_t>(num_rows * rows.width);
    auto* scale = carver.take<float>(num_rows);
    carver.check(what);
    return {values, scale, static_cast<int32_t>(rows.width)};
}

// ---- rows ----

void CudaRecorder::angles(const std::vector<double>& frequencies, double magnitude, const View& out) {
    const int64_t context = program_->limits().context, half = static_cast<int64_t>(frequencies.size());
    part<float2>(out, context * half, "angles");
    std::vector<float> table(context * half * 2);
    const auto fill = [&](int64_t begin, int64_t end) {
        for (int64_t position = begin; position < end; position++) {
            for (int64_t i = 0; i < half; i++) {
                const double angle = static_cast<double>(position) * frequencies[i];
                table[(position * half + i) * 2] = static_cast<float>(std::cos(angle) * magnitude);
                table[(position * half + i) * 2 + 1] = static_cast<float>(std::sin(angle) * magnitude);
            }
        }
    };
    program_->card().pool().parallel_for(context, fill);
    program_->card().write(out, table.data(), table.size() * sizeof(float));
}

void CudaRecorder::embed(const Matrix& table, const View& out) {
    require(table.weights.rows >= program_->limits().vocab, "the embedding has fewer rows than the vocabulary has tokens");
    program_->keep(table.memory);
    program_->add(
        std::make_unique<EmbedStep>(*program_, table, part<float>(out, most(Rows::all) * table.weights.columns, "embed")));
}

void CudaRecorder::norm(const View& x, const View& gamma, float eps, Rows rows, const RowsMemory& out) {
    const int64_t num = most(Rows::all);
    PendingNorm pending{};
    pending.norm.x = part<float>(x, num * out.width, "norm: input");
    pending.norm.gamma = part<float>(gamma, out.width, "norm: gamma");
    pending.norm.eps = eps;
    pending.norm.groups = part<quant::ActGroup>(out.groups, cuda::kMaxWindowRows * groups_of(out.width), "norm: output");
    pending.norm.values = part<float>(out.values, cuda::kMaxWindowRows * out.width, "norm: output");
    pending.norm.half = half_rows(out, num, "norm: output");
    pending.norm.inverse = out.inverse.empty() ? nullptr : part<float>(out.inverse, num, "norm: 1 / rms");
    pending.rows = rows;
    pending.out = out.values.data();
    norm_ = pending;
}

cuda::Products CudaRecorder::products_of(const std::vector<Recorder::Product>& products, Rows rows) {
    require(!products.empty() && products.size() <= cuda::kMaxProducts, std::to_string(products.size()) +
                                                                            " matrices over the same rows; 1 to " +
                                                                            std::to_string(cuda::kMaxProducts) + " are possible");
    cuda::Products made{};
    for (const Recorder::Product& product : products) {
        const int64_t num = most(rows) * product.matrix.weights.rows;
        program_->keep(product.matrix.memory);
        made.product[made.num_products++] = {
            cuda_matrix(product.matrix), part<float>(product.out, num, "matmul: output"),
            product.residual.empty() ? nullptr : part<float>(product.residual, num, "matmul: residual")};
    }
    return made;
}

void CudaRecorder::matmul(const std::vector<Recorder::Product>& products, const RowsMemory& x, Rows rows) {
    const cuda::Products made = products_of(products, rows);
    cuda::plan_products(made, 1, true, program_->card().shape());  // throws for what the card cannot hold
    if (norm_ && norm_->out == x.values.data()) {
        require(norm_->rows == rows, "matmul: other rows than the norm's");
        if (rows == Rows::logits) program_->set_logits(made.product[0].out);
        program_->add(std::make_unique<NormProductsStep>(*program_, norm_->norm, made, rows));
        return;
    }
    require(rows == Rows::all, "matmul: rows with logits must come from a norm");
    const int64_t num = most(rows);
    auto step = std::make_unique<ProductsStep>(*program_,
                                               part<quant::ActGroup>(x.groups, cuda::kMaxWindowRows * groups_of(x.width), "matmul"),
                                               part<float>(x.values, num * x.width, "matmul"), half_rows(x, num, "matmul"), made);
    last_products_ = step.get();
    program_->add(std::move(step));
}

// ---- attention ----

void CudaRecorder::rotary(const Recorder::Heads& heads, const KvMemory& kv) {
    rotary_ = PendingRotary{heads, kv};
}

void CudaRecorder::attention(const View& query, int query_heads, const KvMemory& kv, float scale, const View& spans,
                             const View& out) {
    require(rotary_ && rotary_->kv.layer.keys == kv.layer.keys && rotary_->heads.query.data() == query.data(),
            "attention must follow the rotation of its heads");
    const Recorder::Heads& heads = rotary_->heads;
    const int64_t rows = most(Rows::all), dim = kv.layer.head_dim, width = query_heads * dim, kv_width = kv.layer.num_heads * dim;
    const int64_t context = program_->limits().context;
    require(kv.layer.num_tiles * kKvTile >= context, "attention: the cache is smaller than the context");
    const size_t counters_bytes = query_heads * sizeof(uint32_t);
    if (!attention_counters_) attention_counters_ = program_->card().allocate("workspace", counters_bytes);
    program_->keep(View::of(attention_counters_, 0, counters_bytes));  // the recorder goes before the program runs
    program_->keep(kv.memory);
    cuda::AttentionWindowProblem problem{};
    problem.state = program_->state();
    problem.num_rows = cuda::kMaxWindowRows;
    problem.query = part<float>(query, rows * width, "attention: query");
    problem.key = part<float>(heads.key, rows * kv_width, "attention: key");
    problem.value = part<float>(heads.value, rows * kv_width, "attention: value");
    problem.query_heads = query_heads;
    problem.query_gamma = heads.query_gamma.empty() ? nullptr : part<float>(heads.query_gamma, dim, "attention: query gamma");
    problem.key_gamma = heads.key_gamma.empty() ? nullptr : part<float>(heads.key_gamma, dim, "attention: key gamma");
    problem.eps = heads.eps;
    problem.angles = part<float2>(heads.angles, context * dim / 2, "attention: angles");
    problem.kv = kv.layer;
    problem.scale = scale;
    problem.num_spans = (context + kSpan - 1) / kSpan;
    problem.spans =
        part<float>(spans, cuda::attention_window_floats(cuda::kMaxWindowRows, query_heads, problem.num_spans, kv.layer.head_dim),
                    "attention: spans");
    problem.counters = reinterpret_cast<uint32_t*>(attention_counters_->data());
    problem.out = part<float>(out, rows * width, "attention: output");
    attention_ = PendingAttention{problem, out.data()};
    rotary_.reset();
}

void CudaRecorder::quantise(const RowsMemory& rows) {
    require(attention_ && attention_->out == rows.values.data(), "quantise must follow the attention whose rows it takes");
    cuda::AttentionWindowProblem problem = attention_->problem;
    attention_.reset();
    problem.groups = part<quant::ActGroup>(rows.groups, cuda::kMaxWindowRows * groups_of(rows.width), "quantise");
    const cuda::CardShape& card = program_->card().shape();
    cuda::plan_attention_window(problem, {card.num_multiprocessors, card.block_shared_bytes, problem.num_spans});  // throws
    auto step = std::make_unique<AttentionStep>(*program_, problem, half_rows(rows, most(Rows::all), "quantise"));
    last_attention_ = step.get();
    program_->add(std::move(step));
}

// ---- experts ----

void CudaRecorder::router(const View& x, const View& gamma, const Matrix& weights, const View& sums) {
    const int64_t width = router_width(weights), num_experts = weights.weights.columns;
    const auto* rows = part<float>(x, most(Rows::all) * width, "router: input");
    const auto* factors = part<float>(gamma, width, "router: gamma");
    require(norm_ && norm_->norm.x == rows && norm_->norm.gamma == factors && norm_->norm.inverse != nullptr,
            "a router must follow the norm of its rows, which leaves 1 / rms");
    require(last_attention_ != nullptr, "a router must follow an attention, which clears its sums");
    const int64_t num_rows = std::max<int64_t>(most(Rows::all), cuda::kMaxWindowRows);
    auto* out = part<int64_t>(sums, num_rows * num_experts, "router: sums");
    program_->keep(weights.memory);
    last_attention_->clear(out, static_cast<int>(num_experts));
    const cuda::RouterTail tail{factors, reinterpret_cast<const float*>(weights.weights.data), out,
                                static_cast<int32_t>(num_experts)};
    const bool is_fused = last_products_ != nullptr && last_products_->take_router(rows, tail);
    program_->add(std::make_unique<RouterStep>(norm_->norm, weights, out, is_fused));
    last_attention_ = nullptr;
    last_products_ = nullptr;
    router_ = PendingRouter{out, num_experts};
}

void CudaRecorder::route(const View& sums, const RowsMemory& x, const Recorder::Gate& gate, std::shared_ptr<CudaExpertTable> table,
                         int layer, const View&) {
    require(table != nullptr, "route: a residency table is needed");
    const int num_experts = table->mirror().num_experts();
    require(router_ && router_->sums == sums.as<const int64_t>() && router_->num_experts == num_experts && norm_ &&
                norm_->out == x.values.data(),
            "route must follow its router");
    require(gate.top_k >= 1 && gate.top_k <= num_experts,
            "route: cannot choose " + std::to_string(gate.top_k) + " of " + std::to_string(num_experts) + " experts");
    program_->set_table(table);
    route_ = PendingRoute{{router_->sums, num_experts, gate.top_k, gate.gating, gate.renormalise, gate.scale}, layer};
    router_.reset();
}

void CudaRecorder::routed_memory(const View& routed, int top_k, int num_experts, ExpertsMemory& memory) {
    program_->keep(routed);
    const int64_t pairs = most(Rows::all) * top_k;
    Carver carver(routed);
    memory.routed.ids = carver.take<int32_t>(pairs);
    memory.routed.weights = carver.take<float>(pairs);
    memory.routed.order = carver.take<int32_t>(pairs);
    memory.routed.places = carver.take<int32_t>(pairs);
    memory.routed.counts = carver.take<int32_t>(num_experts);
    memory.routed.firsts = carver.take<int32_t>(num_experts);
    memory.routed.top_k = top_k;
    memory.routed.num_experts = num_experts;
    memory.list.experts = carver.take<ExpertRows>(num_experts);
    memory.list.num_experts = carver.take<int32_t>(1);
    memory.list.tiles = carver.take<cuda::RowTile>(cuda::max_row_tiles(static_cast<int>(pairs), num_experts));
    memory.list.num_tiles = carver.take<int32_t>(1);
    carver.check("experts: routed list");
}

void CudaRecorder::experts(const Recorder::Expert& expert, const std::shared_ptr<CudaExpertTable>& table, int layer, int top_k,
                           const View& routed, const RowsMemory& x, const RowsMemory& hidden, const View& expert_rows,
                           const View& out) {
    require(route_ && route_->layer == layer && route_->choice.top_k == top_k, "experts must follow the route of their layer");
    require(norm_ && norm_->out == x.values.data(), "experts must have the rows of the router's norm");
    const View first = table->mirror().blob(layer, 0);
    const int64_t pairs = most(Rows::all) * top_k, width = expert.gate.rows;
    if (!ring_) ring_ = std::make_shared<ExpertRing>(program_->card(), ring_memory_, table->mirror().num_experts());
    ring_->capacity(first.nbytes);  // throws
    ExpertsMemory memory{};
    memory.x = norm_->norm.half;
    memory.hidden_rows = part<float>(hidden.values, pairs * width, "experts: hidden");
    memory.halves = half_rows(hidden, pairs, "experts: hidden");
    memory.expert_rows = part<float>(expert_rows, pairs * x.width, "experts: rows");
    memory.hidden = part<float>(out, most(Rows::all) * x.width, "experts: output");
    routed_memory(routed, top_k, table->mirror().num_experts(), memory);
    const View blobs = View::of(first.buffer, first.offset, first.nbytes * table->mirror().num_experts());
    program_->add_host_layer({blobs, first.nbytes, expert.gate, expert.up, expert.down});
    program_->add(std::make_unique<ExpertsStep>(*program_, table, ring_, layer, norm_->norm, route_->choice,
                                                ExpertsStep::Parts{expert.gate, expert.up, expert.down}, memory));
    route_.reset();
}

}  // namespace tandem
