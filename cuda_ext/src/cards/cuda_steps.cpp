#include "cards/cuda_steps.h"

#include <algorithm>
#include <stdexcept>

#include "cuda_ops/attention_prompt.h"
#include "cuda_ops/embed.h"
#include "cuda_ops/matmul_prompt.h"
#include "cuda_ops/norm_matmul_window.h"
#include "cuda_ops/norm_prompt.h"
#include "cuda_ops/rotary.h"

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
    cuda::norm_prompt({norm_.x, norm_.gamma, norm_.eps, norm_.half, nullptr}, run.num_rows, run.stream);
    cuda::matmul_prompt(prompt_products(norm_.half, products_), run.num_rows, run.stream);
}

void NormProductsStep::canonical(int first, int num_rows, cudaStream_t stream) const {
    const int64_t offset = int64_t{first} * norm_.half.width;
    cuda::norm_matmul_window({num_rows, norm_.x + offset, norm_.gamma, norm_.eps, products_, norm_.groups, norm_.values},
                             program_.card().shape(), true, stream);
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

bool ProductsStep::take_router(const float* x, const cuda::RouterTail& router) {
    if (products_.product[0].out != x || products_.num_products != 1) return false;
    cuda::Products products = products_;
    products.router = router;
    try {
        cuda::plan_products(products, 1, false, program_.card().shape());
    } catch (const std::invalid_argument&) {
        return false;
    }
    router_ = router;
    return true;
}

void ProductsStep::window(const WindowRun& run) const {
    cuda::Products products = products_;
    if (run.num_rows == 1) products.router = router_;
    cuda::matmul_window({run.num_rows, groups_, values_, products}, program_.card().shape(), true, run.stream);
}

void ProductsStep::prompt(const PromptRun& run) const {
    cuda::matmul_prompt(prompt_products(half_, products_), run.num_rows, run.stream);
}

// ---- router ----

cuda::RouterRowsProblem RouterStep::problem() const {
    const Weights& weights = weights_.weights;
    return {norm_.x,
            norm_.gamma,
            reinterpret_cast<const float*>(weights.data),
            static_cast<int32_t>(weights.rows),
            static_cast<int32_t>(weights.columns),
            sums_};
}

void RouterStep::window(const WindowRun& run) const {
    if (!is_fused_ || run.num_rows > 1) cuda::router_window(problem(), run.num_rows, run.stream);
}

void RouterStep::prompt(const PromptRun& run) const {
    cuda::norm_prompt({norm_.x, norm_.gamma, norm_.eps, norm_.half, norm_.inverse}, run.num_rows, run.stream);
    cuda::router_prompt(problem(), run.num_rows, run.stream);
}

}  // namespace tandem
