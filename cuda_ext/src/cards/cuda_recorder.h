// Records a model's page into a CUDA program: the same calls as Recorder, gathered into the steps of cuda_steps.h.
//
// The card computes several operations in one kernel, so a call may only be remembered until the one that completes it comes:
// norm until its product or router, rotary and attention until quantise, route until experts. Every method throws
// std::invalid_argument for memory that is too small, for types that do not fit, and for a sequence of calls that no step covers.
#pragma once
#include <memory>
#include <optional>
#include <vector>

#include "cards/cuda_experts_step.h"
#include "cards/cuda_program.h"
#include "cards/cuda_steps.h"
#include "cards/recorder.h"

namespace tandem {

class CudaRecorder {
  public:
    // `ring`: memory on the card through which prompts stream the experts that it misses.
    CudaRecorder(std::shared_ptr<CudaProgram> program, View ring);

    // out: [context, head_dim / 2] (cosine, sine), filled at once.
    void angles(const std::vector<double>& frequencies, double magnitude, const View& out);
    void embed(const Matrix& table, const View& out);
    void norm(const View& x, const View& gamma, float eps, Rows rows, const RowsMemory& out);
    // Only of what attention has left, which quantises it itself.
    void quantise(const RowsMemory& rows);
    void matmul(const std::vector<Recorder::Product>& products, const RowsMemory& x, Rows rows);
    void rotary(const Recorder::Heads& heads, const KvMemory& kv);
    void attention(const View& query, int query_heads, const KvMemory& kv, float scale, const View& spans, const View& out);
    // Of the last norm's rows, behind an attention.
    void router(const View& x, const View& gamma, const Matrix& weights, const View& sums);
    void route(const View& sums, const RowsMemory& x, const Recorder::Gate& gate, std::shared_ptr<CudaExpertTable> table, int layer,
               const View& routed);
    void experts(const Recorder::Expert& expert, const std::shared_ptr<CudaExpertTable>& table, int layer, int top_k,
                 const View& routed, const RowsMemory& x, const RowsMemory& hidden, const View& expert_rows, const View& out);

  private:
    struct PendingNorm {
        Norm norm;
        Rows rows;
        const std::byte* out;
    };
    struct PendingRotary {
        Recorder::Heads heads;
        KvMemory kv;
    };
    struct PendingAttention {
        cuda::AttentionWindowProblem problem;
        const std::byte* out;
    };
    struct PendingRoute {
        cuda::Choice choice;
        int layer;
    };
    struct PendingRouter {
        const int64_t* sums;
        int64_t num_experts;
    };

    // Checks that a view holds `num` values of T and keeps its memory alive.
    template <class T>
    T* part(const View& view, int64_t num, const char* what);
    int64_t most(Rows rows) const;
    // Halves and their scales in the memory of a row's quantised groups, which windows use otherwise.
    cuda::HalfRows half_rows(const RowsMemory& rows, int64_t num_rows, const char* what);
    cuda::Products products_of(const std::vector<Recorder::Product>& products, Rows rows);
    void routed_memory(const View& routed, int top_k, int num_experts, ExpertsMemory& memory);

    std::shared_ptr<CudaProgram> program_;
    View ring_memory_;
    std::shared_ptr<ExpertRing> ring_;
    std::shared_ptr<Buffer> attention_counters_;
    std::optional<PendingNorm> norm_;  // stays: router and experts share one
    std::optional<PendingRotary> rotary_;
    std::optional<PendingAttention> attention_;
    std::optional<PendingRoute> route_;
    std::optional<PendingRouter> router_;
    AttentionStep* last_attention_ = nullptr;
    ProductsStep* last_products_ = nullptr;
};

}  // namespace tandem
