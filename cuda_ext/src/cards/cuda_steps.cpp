#include "cards/cuda_steps.h"

#include <algorithm>

#include "cuda_ops/attention_prompt.h"
#include "cuda_ops/embed.h"
#include "cuda_ops/matmul_prompt.h"
#include "cuda_ops/norm_matmul_window.h"
#include "cuda_ops/norm_prompt.h"
#include "cuda_ops/rotary.h"
#include "cuda_ops/route_prompt.h"

namespace tandem {

namespace {

cuda::MatmulPromptProblem prompt_products(const cuda::HalfRows& x, const cuda::Products& products) {
    cuda::MatmulPromptProblem problem{};
    problem.x = x;
    problem.num_parts = products.num_products;
    for (int i = 0; i < products.num_products; i++) {
        const cuda::Product& product = products.product[i];
        problem.parts[i] = {product.weights, product.out, product.residual};
    }
    return problem;
}

}  // namespace

cuda::DeviceMatrix cuda_matrix(const Matrix& matrix) {
    const Weights& weights = matrix.weights;
    return {weights.data, weights.type, static_cast<int32_t>(weights.rows), static_cast<int32_t>(weights.columns),
            weights.row_bytes};
}

cuda::BlobPart blob_part(const BlobMatrix& matrix) {
    return {matrix.type, static_cast<int32_t>(matrix.rows), static_cast<int32_t>(matrix.columns), matrix.offset, matrix.row_bytes};
}

// ---- embedding ----

void EmbedStep::window(const WindowRun& run) const {
    cuda::embed({program_.state()->tokens, run.num_rows, cuda_matrix(table_), out_}, false, run.stream);
}

void EmbedStep::prompt(const PromptRun& run) const {
    cuda::embed({program_.tokens(), run.num_rows, cuda_matrix(table_), out_}, false, run.stream);
}

// ---- norm and products ----

void NormProductsStep::window(const WindowRun& run) const {
    if (rows_ == Rows::all) return canonical(0, run.num_rows, run.stream);
    if (run.num_logits > 0) canonical(run.num_rows - run.num_logits, run.num_logits, run.stream);
}

void NormProductsStep::prompt(const PromptRun& run) const {
    if (rows_ == Rows::logits) {
        if (run.num_logits > 0) canonical(run.num_rows - run.num_logits, run.num_logits, run.stream);
        return;
    }
    cuda::norm_prompt({norm_.x, norm_.gamma, norm_.eps, norm_.half, is_router_ ? norm_.values : nullptr}, run.num_rows, run.stream);
    if (!is_router_) return cuda::matmul_prompt(prompt_products(norm_.half, products_), run.num_rows, run.stream);
    const cuda::Product& router = products_.product[0];
    cuda::router_prompt({norm_.values, reinterpret_cast<const float*>(router.weights.data), router.weights.columns,
                         router.weights.rows, router.out},
                        run.num_rows, run.stream);
}

void NormProductsStep::canonical(int first, int num_rows, cudaStream_t stream) const {
    const int64_t offset = int64_t{first} * norm_.half.width;
    cuda::norm_matmul_window({num_rows, norm_.x + offset, norm_.gamma, norm_.eps, products_}, program_.card().shape(), true,
                             stream);
}

// ---- attention ----

void AttentionStep::window(const WindowRun& run) const {
    cuda::AttentionWindowProblem problem = problem_;
    problem.num_rows = run.num_rows;
    const cuda::CardShape& card = program_.card().shape();
    const cuda::AttentionWindowShape shape{card.num_multiprocessors, card.block_shared_bytes,
                                           std::min(run.usual_spans, problem.num_spans)};
    cuda::attention_window(problem, cuda::plan_attention_window(problem, shape), true, run.stream);
}

void AttentionStep::prompt(const PromptRun& run) const {
    const cuda::AttentionWindowProblem& p = problem_;
    cuda::rotary({p.query, p.key, p.value, p.query_heads, p.query_gamma, p.key_gamma, p.eps, p.angles, p.kv, nullptr, half_.values},
                 run.position, run.num_rows, run.stream);
    cuda::attention_prompt({half_.values, p.query_heads, p.kv, p.scale, p.out}, run.position, run.num_rows, run.stream);
    cuda::halve_prompt({p.out, half_}, run.num_rows, run.stream);
}

// ---- products of attention's rows ----

void ProductsStep::window(const WindowRun& run) const {
    cuda::matmul_window({run.num_rows, groups_, values_, products_}, program_.card().shape(), true, run.stream);
}

void ProductsStep::prompt(const PromptRun& run) const {
    cuda::matmul_prompt(prompt_products(half_, products_), run.num_rows, run.stream);
}

}  // namespace tandem
