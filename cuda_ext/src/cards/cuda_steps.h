// The parts of a forward pass on a CUDA card, each a few launches: what the recorder makes of the operations of a model's page.
#pragma once
#include <memory>
#include <vector>

#include "cards/cuda_program.h"
#include "cards/recorder.h"
#include "cuda_ops/attention_window.h"
#include "cuda_ops/half_rows.h"
#include "cuda_ops/matmul_window.h"
#include "cuda_ops/router.h"

namespace tandem {

// Matrices as kernels take them.
cuda::DeviceMatrix cuda_matrix(const Matrix& matrix);
cuda::BlobPart blob_part(const BlobMatrix& matrix);

// Tokens to rows.
class EmbedStep final : public Step {
  public:
    EmbedStep(const CudaProgram& program, const Matrix& table, float* out) : program_(program), table_(table), out_(out) {}
    const char* name() const override { return "embedding"; }
    void window(const WindowRun& run) const override;
    void prompt(const PromptRun& run) const override;

  private:
    const CudaProgram& program_;
    Matrix table_;
    float* out_;
};

// RMS norm of hidden rows.
struct Norm {
    const float* x;      // [rows, width]
    const float* gamma;  // [width]
    float eps;
    quant::ActGroup* groups;  // [rows, ceil(width / 256)] and
    float* values;            // [rows, width], of windows of several rows
    cuda::HalfRows half;      // [rows, width], of prompts
    float* inverse;           // [rows] 1 / rms, of prompts before a router; or null
};

// Norm and the products of its rows with up to three matrices. `rows`: all, or those that give logits.
class NormProductsStep final : public Step {
  public:
    NormProductsStep(const CudaProgram& program, const Norm& norm, const cuda::Products& products, Rows rows)
        : program_(program), norm_(norm), products_(products), rows_(rows) {}
    const char* name() const override { return rows_ == Rows::logits ? "head" : "query, key, value"; }
    void window(const WindowRun& run) const override;
    void prompt(const PromptRun& run) const override;

  private:
    void canonical(int first, int num_rows, cudaStream_t stream) const;

    const CudaProgram& program_;
    Norm norm_;
    cuda::Products products_;
    Rows rows_;
};

// Norm and rotation of heads, the way into the cache, attention.
class AttentionStep final : public Step {
  public:
    // `problem` without rows and shape. `half`: [rows, query width], of prompts: rotated queries, then the result.
    AttentionStep(const CudaProgram& program, const cuda::AttentionWindowProblem& problem, const cuda::HalfRows& half)
        : program_(program), problem_(problem), half_(half) {}
    const char* name() const override { return "attention"; }
    void window(const WindowRun& run) const override;
    void prompt(const PromptRun& run) const override;

    // Makes the sums [rows, num] of windows zero.
    void clear(int64_t* sums, int num) {
        problem_.sums = sums;
        problem_.num_sums = num;
    }

  private:
    const CudaProgram& program_;
    cuda::AttentionWindowProblem problem_;
    cuda::HalfRows half_;
};

// Products of attention's rows, residual added.
class ProductsStep final : public Step {
  public:
    ProductsStep(const CudaProgram& program, const quant::ActGroup* groups, const float* values, const cuda::HalfRows& half,
                 const cuda::Products& products)
        : program_(program), groups_(groups), values_(values), half_(half), products_(products) {}
    const char* name() const override { return router_.weights ? "output projection, router" : "output projection"; }
    void window(const WindowRun& run) const override;
    void prompt(const PromptRun& run) const override;

    // Adds the router's sums in windows of one row, if the products make the rows `x` and the card has room for it.
    bool take_router(const float* x, const cuda::RouterTail& router);

  private:
    const CudaProgram& program_;
    const quant::ActGroup* groups_;
    const float* values_;
    cuda::HalfRows half_;
    cuda::Products products_;
    cuda::RouterTail router_{};
};

// Norm and router.
class RouterStep final : public Step {
  public:
    // `sums`: [rows, experts]. `is_fused`: the step before has made those of windows of one row.
    RouterStep(const Norm& norm, const Matrix& weights, int64_t* sums, bool is_fused)
        : norm_(norm), weights_(weights), sums_(sums), is_fused_(is_fused) {}
    const char* name() const override { return "router"; }
    void window(const WindowRun& run) const override;
    void prompt(const PromptRun& run) const override;

  private:
    cuda::RouterRowsProblem problem() const;

    Norm norm_;
    Matrix weights_;
    int64_t* sums_;
    bool is_fused_;
};

}  // namespace tandem
