#include "cards/recorder.h"

#include <string>

#include "base/require.h"
#include "ops/attention.h"
#include "ops/embed.h"
#include "ops/matmul.h"
#include "ops/norm.h"
#include "quant/types.h"

namespace tandem {

namespace {

quant::Type checked_type(uint32_t type_id, int64_t rows, int64_t columns) {
    require(quant::type_known(type_id), "weight type " + std::to_string(type_id) + " is not known");
    const auto type = static_cast<quant::Type>(type_id);
    require(rows > 0 && columns > 0 && columns % quant::block_values(type) == 0,
            "a matrix of " + std::to_string(rows) + " rows of " + std::to_string(columns) + " values cannot have the type " +
                quant::type_name(type));
    return type;
}

void require_groups(const Weights& weights, const Activations& x) {
    require(weights.columns == x.width,
            "a matrix of " + std::to_string(weights.columns) + " columns cannot take rows of " + std::to_string(x.width));
    require(quant::type_wants_values(weights.type) || x.groups != nullptr,
            std::string("weights of type ") + quant::type_name(weights.type) + " need quantised activations");
}

}  // namespace

Matrix Matrix::in(const View& memory, uint32_t type_id, int64_t rows, int64_t columns) {
    const quant::Type type = checked_type(type_id, rows, columns);
    const size_t row_bytes = quant::row_bytes(type, columns);
    require(memory.nbytes == row_bytes * rows, "a matrix of " + std::to_string(row_bytes * rows) + " bytes was given " +
                                                   std::to_string(memory.nbytes) + " bytes of memory");
    return {memory, {memory.as<const uint8_t>(), type, rows, columns, row_bytes}};
}

int64_t router_width(const Matrix& matrix) {
    const Weights& weights = matrix.weights;
    require(weights.type == quant::Type::F32 && weights.rows <= kMaxRouterWidth,
            std::string("a router of type ") + quant::type_name(weights.type) + " over " + std::to_string(weights.rows) +
                " values; float32 and up to " + std::to_string(kMaxRouterWidth) + " are possible");
    return weights.rows;
}

BlobMatrix blob_matrix(uint32_t type_id, size_t offset, int64_t rows, int64_t columns) {
    const quant::Type type = checked_type(type_id, rows, columns);
    return {type, offset, rows, columns, quant::row_bytes(type, columns)};
}

KvMemory KvMemory::in(const View& memory, KvType type, int num_heads, int head_dim, int64_t context) {
    require(num_heads > 0 && context > 0 && head_dim > 0 && head_dim % 2 == 0 && head_dim <= kMaxHeadDim,
            "heads of " + std::to_string(head_dim) + " values are not supported; an even number up to " +
                std::to_string(kMaxHeadDim) + " is");
    const int64_t tiles = (context + kKvTile - 1) / kKvTile;
    const size_t half = static_cast<size_t>(num_heads) * tiles * kv_tile_bytes(type, head_dim);
    require(memory.nbytes >= 2 * half,
            "keys and values need " + std::to_string(2 * half) + " bytes, but got " + std::to_string(memory.nbytes));
    return {memory, {type, num_heads, head_dim, tiles, memory.data(), memory.data() + half}};
}

Recorder::Recorder(std::shared_ptr<Program> program, quant::Isa isa)
    : program_(std::move(program)), row_kernels_(&quant::row_kernels(isa)), vector_kernels_(&vector_kernels(isa)) {
    require(program_ != nullptr, "a recorder needs a program");
}

template <class T>
T* Recorder::part(const View& view, int64_t num, const char* what) {
    require(!view.empty() && view.nbytes >= num * sizeof(T), std::string(what) + ": " + std::to_string(num * sizeof(T)) +
                                                                 " bytes are needed, but there are " + std::to_string(view.nbytes));
    program_->keep(view);
    return view.as<T>();
}

quant::ActGroup* Recorder::groups(const RowsMemory& rows, int64_t num_rows, const char* what) {
    if (rows.groups.empty()) return nullptr;
    require(rows.width % 32 == 0, std::string(what) + ": rows of " + std::to_string(rows.width) + " values cannot be quantised");
    return part<quant::ActGroup>(rows.groups, num_rows * groups_of(rows.width), what);
}

Activations Recorder::activations(const RowsMemory& rows, int64_t num_rows, const char* what) {
    return {part<float>(rows.values, num_rows * rows.width, what), groups(rows, num_rows, what), rows.width};
}

int64_t Recorder::most(Rows rows) const {
    return rows == Rows::all ? program_->limits().max_rows : program_->limits().max_logits;
}

void Recorder::angles(const std::vector<double>& frequencies, double magnitude, const View& out) {
    AnglesProblem problem{frequencies, magnitude, nullptr};
    problem.out = part<float>(out, most(Rows::all) * static_cast<int64_t>(frequencies.size()) * 2, "angles");
    program_->add([problem](Pool& pool, const Window& window) { tandem::angles(pool, problem, window); });
}

void Recorder::embed(const Matrix& table, const View& out) {
    require(table.weights.rows >= program_->limits().vocab, "the embedding has fewer rows than the vocabulary has tokens");
    program_->keep(table.memory);
    const EmbedProblem problem{table.weights, part<float>(out, most(Rows::all) * table.weights.columns, "embed")};
    program_->add([problem](Pool& pool, const Window& window) { tandem::embed(pool, problem, window); });
}

void Recorder::norm(const View& x, const View& gamma, float eps, Rows rows, const RowsMemory& out) {
    NormProblem problem{};
    problem.x = part<float>(x, most(Rows::all) * out.width, "norm: input");
    problem.gamma = part<float>(gamma, out.width, "norm: gamma");
    problem.width = out.width;
    problem.eps = eps;
    problem.rows = rows;
    problem.values = part<float>(out.values, most(rows) * out.width, "norm: output");
    problem.groups = groups(out, most(rows), "norm: groups");
    problem.inverse = out.inverse.empty() ? nullptr : part<float>(out.inverse, most(rows), "norm: 1 / rms");
    problem.kernels = row_kernels_;
    require(problem.values != problem.x, "norm: input and output must differ");
    program_->add([problem](Pool& pool, const Window& window) { tandem::norm(pool, problem, window); });
}

void Recorder::quantise(const RowsMemory& rows) {
    const Activations x = activations(rows, most(Rows::all), "quantise");
    require(x.groups != nullptr, "quantise: there is no memory for the groups");
    const QuantiseProblem problem{x.values, x.width, const_cast<quant::ActGroup*>(x.groups), row_kernels_};
    program_->add([problem](Pool& pool, const Window& window) { tandem::quantise(pool, problem, window); });
}

void Recorder::matmul(const std::vector<Product>& products, const RowsMemory& x, Rows rows) {
    MatmulProblem problem{{}, activations(x, most(rows), "matmul: input"), rows, row_kernels_};
    require(!products.empty(), "matmul: no matrix was given");
    for (const Product& product : products) {
        const Weights& weights = product.matrix.weights;
        require_groups(weights, problem.x);
        program_->keep(product.matrix.memory);
        const int64_t num = most(rows) * weights.rows;
        problem.parts.push_back({weights, part<float>(product.out, num, "matmul: output"),
                                 product.residual.empty() ? nullptr : part<float>(product.residual, num, "matmul: residual")});
    }
    program_->add([problem](Pool& pool, const Window& window) { tandem::matmul(pool, problem, window); });
}

void Recorder::rotary(const Heads& heads, const KvMemory& kv) {
    const int64_t rows = most(Rows::all), dim = kv.layer.head_dim, kv_width = kv.layer.num_heads * dim;
    program_->keep(kv.memory);
    RotaryProblem problem{};
    problem.query = part<float>(heads.query, rows * heads.query_heads * dim, "rotary: query");
    problem.key = part<float>(heads.key, rows * kv_width, "rotary: key");
    problem.value = part<float>(heads.value, rows * kv_width, "rotary: value");
    problem.query_heads = heads.query_heads;
    problem.query_gamma = heads.query_gamma.empty() ? nullptr : part<float>(heads.query_gamma, dim, "rotary: query gamma");
    problem.key_gamma = heads.key_gamma.empty() ? nullptr : part<float>(heads.key_gamma, dim, "rotary: key gamma");
    problem.eps = heads.eps;
    problem.angles = part<float>(heads.angles, rows * dim, "rotary: angles");
    problem.kv = kv.layer;
    problem.kernels = vector_kernels_;
    program_->add([problem](Pool& pool, const Window& window) { tandem::rotary(pool, problem, window); });
}

void Recorder::attention(const View& query, int query_heads, const KvMemory& kv, float scale, const View& spans, const View& out) {
    const int64_t rows = most(Rows::all), width = int64_t{query_heads} * kv.layer.head_dim;
    require(query_heads % kv.layer.num_heads == 0 && query_heads / kv.layer.num_heads <= kMaxGroupHeads,
            std::to_string(query_heads) + " query heads on " + std::to_string(kv.layer.num_heads) +
                " key/value heads are not supported; up to " + std::to_string(kMaxGroupHeads) + " may share one");
    require(kv.layer.num_tiles * kKvTile >= program_->limits().context, "attention: the cache is smaller than the context");
    program_->keep(kv.memory);
    const int64_t num_spans = (program_->limits().context + kSpan - 1) / kSpan;
    const int64_t stored = std::min<int64_t>(rows, kSplitRows) * query_heads * num_spans * (kv.layer.head_dim + 2);
    const AttentionProblem problem{part<float>(query, rows * width, "attention: query"),
                                   query_heads,
                                   kv.layer,
                                   scale,
                                   part<float>(spans, stored, "attention: spans"),
                                   num_spans,
                                   part<float>(out, rows * width, "attention: output"),
                                   vector_kernels_};
    program_->add([problem](Pool& pool, const Window& window) { tandem::attention(pool, problem, window); });
}

void Recorder::router(const View& x, const View& gamma, const Matrix& weights, const View& sums) {
    const int64_t rows = most(Rows::all), width = router_width(weights), num_experts = weights.weights.columns;
    program_->keep(weights.memory);
    const RouterProblem problem{part<float>(x, rows * width, "router: input"),
                                part<float>(gamma, width, "router: gamma"),
                                reinterpret_cast<const float*>(weights.weights.data),
                                width,
                                static_cast<int>(num_experts),
                                part<int64_t>(sums, rows * num_experts, "router: sums"),
                                vector_kernels_};
    program_->add([problem](Pool& pool, const Window& window) { tandem::router(pool, problem, window); });
}

void Recorder::route(const View& sums, const RowsMemory& x, const Gate& gate, std::shared_ptr<ExpertTable> table, int layer,
                     const View& routed) {
    require(table != nullptr, "route: a residency table is needed");
    table->blob(layer, 0);  // the layer must have blobs
    const int num_experts = table->num_experts();
    require(gate.top_k >= 1 && gate.top_k <= num_experts,
            "route: cannot choose " + std::to_string(gate.top_k) + " of " + std::to_string(num_experts) + " experts");
    require(num_experts <= kMaxExperts, "route: " + std::to_string(num_experts) + " experts in a layer; up to " +
                                            std::to_string(kMaxExperts) + " are possible");
    RouteProblem problem{};
    problem.sums = part<int64_t>(sums, most(Rows::all) * num_experts, "route: sums");
    problem.inverse = part<float>(x.inverse, most(Rows::all), "route: 1 / rms");
    problem.num_experts = num_experts;
    problem.gating = gate.gating;
    problem.renormalise = gate.renormalise;
    problem.scale = gate.scale;
    problem.table = table.get();
    problem.layer = layer;
    problem.routed = Routed::in(routed, program_->limits().max_rows, gate.top_k, num_experts);
    problem.kernels = vector_kernels_;
    program_->keep(routed);
    program_->add([problem, table](Pool& pool, const Window& window) { tandem::route(pool, problem, window); });
}

void Recorder::experts(const Expert& expert, const std::shared_ptr<ExpertTable>& table, int layer, int top_k, const View& routed,
                       const RowsMemory& x, const RowsMemory& hidden, const View& expert_rows, const View& out) {
    const int64_t rows = most(Rows::all), pairs = rows * top_k, width = expert.gate.rows;
    require(table != nullptr, "experts: a residency table is needed");
    const size_t blob_bytes = table->blob(layer, 0).nbytes;
    for (const BlobMatrix* matrix : {&expert.gate, &expert.up, &expert.down})
        require(matrix->offset + matrix->rows * matrix->row_bytes <= blob_bytes,
                "experts: a matrix ends behind its blob of " + std::to_string(blob_bytes) + " bytes");
    require(expert.up.rows == width && hidden.width == width && expert.down.columns == width && expert.down.rows == x.width &&
                expert.gate.columns == x.width && expert.up.columns == x.width,
            "experts: gate, up and down do not fit together");
    ExpertsProblem problem{};
    problem.gate = expert.gate;
    problem.up = expert.up;
    problem.down = expert.down;
    problem.routed = Routed::in(routed, program_->limits().max_rows, top_k, table->num_experts());
    problem.x = activations(x, rows, "experts: input");
    require((quant::type_wants_values(expert.gate.type) && quant::type_wants_values(expert.up.type)) || problem.x.groups,
            "experts: gate and up need quantised activations");
    problem.hidden = part<float>(hidden.values, pairs * width, "experts: hidden");
    if (!quant::type_wants_values(expert.down.type)) {
        problem.hidden_groups = groups(hidden, pairs, "experts: hidden groups");
        require(problem.hidden_groups != nullptr, "experts: down needs quantised activations");
    }
    problem.expert_rows = part<float>(expert_rows, pairs * x.width, "experts: rows");
    problem.out = part<float>(out, rows * x.width, "experts: output");
    problem.row_kernels = row_kernels_;
    problem.vector_kernels = vector_kernels_;
    problem.layer = layer;
    program_->keep(routed);
    program_->add([problem, table, program = program_.get()](Pool& pool, const Window& window) {
        ExpertsProblem now = problem;
        now.linked = table->linked();
        tandem::experts(pool, now, window);
        if (now.linked && now.linked->lost()) program->interrupt();
    });
}

}  // namespace tandem
