// A model's forward pass on a CUDA card: windows of up to eight rows as captured graphs, prompts launch by launch.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "cards/cuda_card.h"
#include "cards/host_tier.h"
#include "cards/program.h"
#include "cards/watchdog.h"
#include "cuda_ops/choose_window.h"
#include "cuda_ops/finish_window.h"
#include "cuda_ops/likeliest.h"
#include "cuda_ops/miss_post.h"
#include "cuda_ops/window_state.h"
#include "ops/chooser.h"

namespace tandem {

// What a window's launches are made for. Its position is in the card's WindowState, because the launches are captured.
struct WindowRun {
    int num_rows;
    int num_logits;
    bool chooses;            // the token behind the last row
    int64_t usual_spans;     // of attention: the context used so far, rounded up
    const uint8_t* offered;  // [layers, experts] on the card: what the partner computes for it; or null
    bool leaves_room;        // for kernels of others, while it waits for rows
    cudaStream_t stream;
};

// Another engine, which computes rows for this one's windows.
class WindowPartner {
  public:
    virtual ~WindowPartner() = default;
    // Before a window: what the partner offers, as in WindowRun; enqueues what brings it to the card.
    virtual const uint8_t* begin_window(int num_rows, cudaStream_t stream) = 0;
    // Where windows are offered something, if they are.
    virtual const uint8_t* offer_place() const = 0;
    // From time to time while a window is waited for that was offered something.
    virtual bool partner_is_there() = 0;
    virtual void end_window(bool voided) = 0;
};

// A chunk of a prompt.
struct PromptRun {
    int num_rows;
    int num_logits;
    int64_t position;
    cudaStream_t stream;
};

// A part of the forward pass. Enqueues only; throws std::invalid_argument for what the card cannot do.
class Step {
  public:
    virtual ~Step() = default;
    virtual const char* name() const = 0;
    virtual void window(const WindowRun& run) const = 0;
    virtual void prompt(const PromptRun& run) const = 0;
};

// Confined to the engine loop; `interrupt` by any thread.
class CudaProgram {
  public:
    // Longest that a window may wait for the host tier before it is given up.
    static constexpr double kWindowTimeoutS = 20.0;

    // `tokens`: memory on the card for max_rows int32. `hidden`: width of the model; `top_k`: of its routers.
    CudaProgram(std::shared_ptr<CudaCard> card, const Program::Limits& limits, View tokens, int top_k, int64_t hidden);
    ~CudaProgram();

    CudaCard& card() const { return *card_; }
    const Program::Limits& limits() const { return limits_; }
    int num_operations() const { return static_cast<int>(steps_.size()); }

    // ---- recording ----
    void add(std::unique_ptr<Step> step) { steps_.push_back(std::move(step)); }
    void keep(const View& view) { kept_.push_back(view.buffer); }
    void set_table(std::shared_ptr<CudaExpertTable> table);
    void set_logits(const float* logits) { logits_ = logits; }
    void add_host_layer(HostTier::Layer layer) { host_layers_.push_back(std::move(layer)); }
    const int32_t* tokens() const { return tokens_.as<const int32_t>(); }
    const cuda::WindowState* state() const { return state_.as<const cuda::WindowState>(); }
    cuda::MissState* misses() const { return misses_.as<cuda::MissState>(); }
    const cuda::MissPost* posts() const { return posts_.data(); }
    const cuda::WindowWords* words() const { return host_tier_->words(); }
    const cuda::PostShape& post_shape() const { return post_shape_; }
    const std::vector<HostTier::Layer>& host_layers() const { return host_layers_; }

    // ---- whom windows ask beside the host tier; before the first run ----
    // `shares_card`: its kernels run on this card too.
    void set_source(cuda::Source source, const cuda::MissPost& post, bool shares_card);
    // Null: there is no partner any more.
    void set_partner(WindowPartner* partner) { partner_ = partner; }
    // Share of a window's absent experts that the second card reads from the arena. Between windows.
    void set_peer_ratio(float ratio) { peer_ratio_ = ratio; }
    // The card's own share, and the other, of which there is at most the rest.
    float streamed_ratio() const { return card_->streamed_ratio(); }
    float peer_ratio() const { return std::min(peer_ratio_, 1.0f - streamed_ratio()); }
    // Called after a window that was given up: returns when the second card is through with what it was asked.
    void set_peer_recovery(std::function<void()> recover) { recover_peer_ = std::move(recover); }
    // The number that the next request comes after. Between windows.
    void set_posted(cuda::Source source, uint32_t number);
    uint32_t posted(cuda::Source source) const;

    // ---- running ----
    // `chooser`: how the token behind the last row is chosen, where it is; then num_logits is 1.
    // Throws std::invalid_argument for rows beyond the limits, Interrupted, CudaError.
    void run(std::span<const int32_t> tokens, int64_t position, int num_logits, const Chooser* chooser = nullptr);
    // Captures what windows of one row will be launched as, with and without the others, for all lengths of context: a capture
    // takes as long as several windows, and none should wait for it when the pair wakes or sleeps.
    void prepare_windows();
    // Of the last run: one entry per row of logits.
    std::span<const cuda::Likeliest> likeliest() const;
    // The token that the last run chose; none where it was not asked to, or there were too many to choose among.
    std::optional<int32_t> chosen() const;
    // Logits of the last run's row, [vocab] floats in host memory, valid until the next call. Blocks.
    View read_logits(int row);
    // The run in progress, or else the next one, ends soon; a window runs to its end.
    void interrupt() { interrupted_.store(true, std::memory_order_relaxed); }
    // Milliseconds by kind of step of one row at `position`, launched step by step: what each costs alone, without overlapping the
    // next. The row's keys and values are overwritten. Blocks.
    std::map<std::string, double> profile(int32_t token, int64_t position, int repeats);
    int64_t num_voided() const { return num_voided_; }

  private:
    // Number of rows, of logits, whether a token is chosen, number of usual spans, and what is offered.
    using GraphKey = std::tuple<int, int, bool, int64_t, const uint8_t*>;

    void prepare();
    // What `chooser` needs on the card beside its rule, which is in the WindowState.
    void post_changes(const Chooser& chooser);
    void run_window(std::span<const int32_t> tokens, int64_t position, int num_logits, const Chooser* chooser);
    void run_prompt(std::span<const int32_t> tokens, int64_t position, int num_logits, const Chooser* chooser);
    cudaGraphExec_t graph_for(const GraphKey& key);
    void enqueue_window(const WindowRun& run);
    void enqueue_state(cudaStream_t stream);
    void enqueue_end(int num_logits, bool chooses, cudaStream_t stream);
    void await_window();
    void watch();

    std::shared_ptr<CudaCard> card_;
    Program::Limits limits_;
    View tokens_;
    std::vector<std::unique_ptr<Step>> steps_;
    std::vector<std::shared_ptr<Buffer>> kept_;
    std::shared_ptr<CudaExpertTable> table_;
    const float* logits_ = nullptr;
    cuda::PostShape post_shape_;
    View state_;         // WindowState on the card
    View staged_state_;  // the next one, in mapped memory
    View staged_tokens_;
    View misses_;
    View post_memory_;
    std::array<cuda::MissPost, cuda::kNumSources> posts_{};
    bool peer_shares_card_ = false;
    float peer_ratio_ = 0.0f;
    WindowPartner* partner_ = nullptr;
    const uint8_t* offered_ = nullptr;  // to the window in progress
    std::function<void()> recover_peer_;
    View end_;  // WindowEnd, mapped
    View likeliest_parts_;
    View likeliest_;       // [max_logits], mapped
    View logit_changes_;   // [vocab] LogitChange, mapped
    View changed_logits_;  // [vocab]
    View choice_scratch_;
    View chosen_;         // the token, mapped
    View read_;           // [vocab], mapped
    View counter_;        // of finish_window's blocks
    int num_logits_ = 0;  // of the last run
    bool chose_ = false;  // in the last run
    std::vector<HostTier::Layer> host_layers_;
    std::unique_ptr<HostTier> host_tier_;
    Watchdog watchdog_;
    std::map<GraphKey, cudaGraphExec_t> graphs_;
    std::atomic<bool> interrupted_{false};
    int64_t num_voided_ = 0;
};

}  // namespace tandem
