// The routed experts of a layer on a CUDA card.
#pragma once
#include <array>
#include <memory>
#include <vector>

#include "cards/cuda_program.h"
#include "cards/cuda_steps.h"
#include "cuda_ops/experts_prompt.h"
#include "cuda_ops/experts_window.h"
#include "ops/experts.h"

namespace tandem {

// Through which the experts that a prompt misses come to the card: buffers of a few blobs each, filled while the compute stream
// works on others. What the second card's slots hold comes from there on a stream of its own, beside what comes from the arena on
// the copy stream: two ways that do not share a wire. One per program, shared by its layers. Confined to the engine loop.
class ExpertRing {
  public:
    static constexpr int kBuffers = 3;

    // `memory` on the card.
    ExpertRing(CudaCard& card, View memory, int num_experts);
    ~ExpertRing();
    ExpertRing(const ExpertRing&) = delete;
    ExpertRing& operator=(const ExpertRing&) = delete;

    // How many blobs of this size a buffer takes; at least 1, or std::invalid_argument.
    int capacity(size_t blob_bytes) const;
    std::byte* place(int buffer, size_t blob_bytes, int index) const;

    // Copies wait until the compute stream has released the buffer.
    void begin(int buffer);
    void copy_from_arena(std::byte* to, const View& blob);
    void copy_from_peer(std::byte* to, const View& slot);
    // The compute stream waits until the copies have landed.
    void landed(int buffer);
    void release(int buffer);

    // Pinned: counts of the experts as the router left them, and lists on their way to the card.
    int32_t* counts() const { return counts_.as<int32_t>(); }
    ExpertRows* staged() const { return staged_.as<ExpertRows>(); }
    int32_t* staged_counts() const { return staged_counts_.as<int32_t>(); }
    // Waits for what the compute stream has been given so far.
    void await_router();

    int next_buffer = 0;

  private:
    CudaCard& card_;
    View memory_;
    View counts_;
    View staged_;
    View staged_counts_;
    cudaStream_t from_peer_ = nullptr;
    cudaEvent_t routed_ = nullptr;
    std::array<cudaEvent_t, kBuffers> filled_{};       // as far as the arena is concerned
    std::array<cudaEvent_t, kBuffers> peer_filled_{};  // and the second card
    std::array<cudaEvent_t, kBuffers> released_{};
};

struct ExpertsMemory {
    cuda::HalfRows x;       // of prompts
    float* hidden_rows;     // [pairs, width]
    cuda::HalfRows halves;  // the same, of prompts
    float* expert_rows;     // [pairs, hidden], of prompts
    float* hidden;          // [rows, hidden], added to
    cuda::RoutedPrompt routed;
    cuda::ExpertList list;
};

class ExpertsStep final : public Step {
  public:
    struct Parts {
        BlobMatrix gate;
        BlobMatrix up;
        BlobMatrix down;
    };

    ExpertsStep(CudaProgram& program, std::shared_ptr<CudaExpertTable> table, std::shared_ptr<ExpertRing> ring, int layer,
                const Norm& norm, const cuda::Choice& choice, const Parts& parts, const ExpertsMemory& memory);
    const char* name() const override { return "experts"; }
    void window(const WindowRun& run) const override;
    void prompt(const PromptRun& run) const override;

  private:
    // `offered`: as in WindowRun.
    cuda::ExpertPlaces places(const uint8_t* offered) const;
    cuda::ExpertsPromptProblem prompt_problem() const;
    void compute(const cuda::ExpertsPromptProblem& problem, int num_pairs, int num_experts, cudaStream_t stream) const;
    void stream_missing(const cuda::ExpertsPromptProblem& problem, const PromptRun& run) const;
    void fetch(std::byte* place, const ExpertRows& rows) const;
    // Streams experts from `begin` of `missing` on; returns the first that did not fit.
    size_t stream_batch(const cuda::ExpertsPromptProblem& problem, const std::vector<ExpertRows>& missing, size_t begin,
                        cudaStream_t stream) const;

    CudaProgram& program_;
    std::shared_ptr<CudaExpertTable> table_;
    std::shared_ptr<ExpertRing> ring_;
    int layer_;
    Norm norm_;
    cuda::Choice choice_;
    Parts parts_;
    ExpertsMemory memory_;
};

}  // namespace tandem
