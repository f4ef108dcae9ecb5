#include "cards/cuda_program.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>
#include <thread>

#include "base/require.h"
#include "cards/cuda_check.h"
#include "ops/attention.h"

namespace tandem {

namespace {

View mapped(size_t nbytes) {
    return View::of(allocate_mapped(nbytes), 0, nbytes);
}

View on_card(size_t nbytes) {
    return View::of(allocate_device(nbytes), 0, nbytes);
}

// Spans of attention up to `end`, rounded up so that few graphs serve all contexts.
int64_t usual_spans(int64_t end) {
    return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>((end + kSpan - 1) / kSpan)));
}

}  // namespace

CudaProgram::CudaProgram(std::shared_ptr<CudaCard> card, const Program::Limits& limits, View tokens, int top_k, int64_t hidden)
    : card_(std::move(card)),
      limits_(limits),
      tokens_(std::move(tokens)),
      post_shape_{cuda::kMaxWindowRows, top_k, static_cast<int32_t>(hidden)},
      state_(on_card(sizeof(cuda::WindowState))),
      staged_state_(mapped(sizeof(cuda::WindowState))),
      staged_tokens_(mapped(limits.max_rows * sizeof(int32_t))),
      misses_(on_card(sizeof(cuda::MissState))),
      post_memory_(mapped(HostTier::shared_bytes(post_shape_))),
      end_(mapped(sizeof(cuda::WindowEnd))),
      likeliest_parts_(on_card(limits.max_logits * sizeof(cuda::LikeliestParts))),
      likeliest_(mapped(limits.max_logits * sizeof(cuda::Likeliest))),
      logit_changes_(mapped(limits.vocab * sizeof(LogitChange))),
      changed_logits_(on_card(limits.vocab * sizeof(float))),
      choice_scratch_(on_card(sizeof(cuda::ChoiceScratch))),
      chosen_(mapped(sizeof(int32_t))),
      read_(mapped(limits.vocab * sizeof(float))),
      counter_(on_card(sizeof(uint32_t))),
      watchdog_([this] {
          if (host_tier_) host_tier_->abort();
      }) {
    require(limits.max_logits <= cuda::kMaxWindowRows,
            "a run on a CUDA card gives at most " + std::to_string(cuda::kMaxWindowRows) + " rows of logits");
    require(tokens_.nbytes >= limits.max_rows * sizeof(int32_t), "the memory for a run's tokens is too small");
}

CudaProgram::~CudaProgram() {
    cudaStreamSynchronize(card_->compute_stream());
    for (const auto& [key, graph] : graphs_) cudaGraphExecDestroy(graph);
}

void CudaProgram::set_table(std::shared_ptr<CudaExpertTable> table) {
    require(table_ == nullptr || table_ == table, "a program has one residency table");
    table_ = std::move(table);
}

void CudaProgram::set_source(cuda::Source source, const cuda::MissPost& post, bool shares_card) {
    require(!host_tier_, "a source of rows must be there before the first run");
    posts_[source] = post;
    if (source == cuda::kPeerSource) peer_shares_card_ = shares_card;
}

void CudaProgram::set_posted(cuda::Source source, uint32_t number) {
    card_->write(misses_, &number, sizeof number, offsetof(cuda::MissState, posted) + source * sizeof number);
}

uint32_t CudaProgram::posted(cuda::Source source) const {
    cuda::MissState state{};
    CUDA_CHECK(cudaMemcpy(&state, misses_.data(), sizeof state, cudaMemcpyDeviceToHost));
    return state.posted[source];
}

void CudaProgram::run(std::span<const int32_t> tokens, int64_t position, int num_logits, const Chooser* chooser) {
    limits_.check(tokens, position, num_logits);
    require(chooser == nullptr || num_logits == 1, "a token is chosen from one row of logits");
    const DeviceScope scope(card_->device());
    prepare();
    if (interrupted_.exchange(false, std::memory_order_relaxed)) throw Interrupted();
    num_logits_ = 0;
    chose_ = false;
    if (chooser) post_changes(*chooser);
    if (tokens.size() <= cuda::kMaxWindowRows) {
        run_window(tokens, position, num_logits, chooser);
    } else {
        run_prompt(tokens, position, num_logits, chooser);
    }
    num_logits_ = num_logits;
    chose_ = chooser != nullptr;
    table_->landed();
}

void CudaProgram::prepare() {
    if (host_tier_) return;
    require(table_ != nullptr && logits_ != nullptr, "the program was not recorded to its end");
    host_tier_ = std::make_unique<HostTier>(post_shape_, host_layers_, post_memory_, card_->isa());
    host_tier_->set_watch([this] { watch(); });
    posts_[cuda::kHostSource] = host_tier_->post();
}

void CudaProgram::post_changes(const Chooser& chooser) {
    const std::span<const LogitChange> changes = chooser.changes();
    for (const LogitChange& change : changes)
        require(change.token >= 0 && change.token < limits_.vocab, "the model has no token " + std::to_string(change.token));
    std::copy(changes.begin(), changes.end(), logit_changes_.as<LogitChange>());
}

// ---- windows ----

void CudaProgram::run_window(std::span<const int32_t> tokens, int64_t position, int num_logits, const Chooser* chooser) {
    const int num_rows = static_cast<int>(tokens.size());
    offered_ = partner_ ? partner_->begin_window(num_rows, card_->compute_stream()) : nullptr;
    bool voided = true;
    try {
        const cudaGraphExec_t graph =
            graph_for({num_rows, num_logits, chooser != nullptr, usual_spans(position + num_rows), offered_});
        auto* state = staged_state_.as<cuda::WindowState>();
        *state = {num_rows, num_logits, position, {streamed_ratio(), peer_ratio()}, {}, chooser ? chooser->rule() : ChoiceRule{}};
        std::copy(tokens.begin(), tokens.end(), state->tokens);
        host_tier_->begin();
        watchdog_.arm(kWindowTimeoutS);
        CUDA_CHECK(cudaGraphLaunch(graph, card_->compute_stream()));
        await_window();
        watchdog_.disarm();
        voided = end_.as<const cuda::WindowEnd>()->voided != 0;
    } catch (...) {
        if (partner_) partner_->end_window(true);
        throw;
    }
    if (partner_) partner_->end_window(voided);
    if (!voided) return;
    num_voided_++;
    if (recover_peer_) recover_peer_();
    throw Interrupted();  // nothing was committed: the window can be run again
}

// The partner's death need not wait for the watchdog.
void CudaProgram::watch() {
    if (offered_ && !partner_->partner_is_there()) host_tier_->abort();
}

void CudaProgram::await_window() {
    if (table_->all_on_cards()) {
        host_tier_->await_end();
    } else {
        host_tier_->serve(card_->pool());
    }
    // An aborted window drains by itself; a card that has failed says so here.
    if (host_tier_->aborted()) CUDA_CHECK(cudaStreamSynchronize(card_->compute_stream()));
}

cudaGraphExec_t CudaProgram::graph_for(const GraphKey& key) {
    if (const auto found = graphs_.find(key); found != graphs_.end()) return found->second;
    const auto& [num_rows, num_logits, chooses, spans, offered] = key;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    const cudaStream_t stream = card_->compute_stream();
    CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    try {
        enqueue_window({num_rows, num_logits, chooses, spans, offered, offered != nullptr || peer_shares_card_, stream});
    } catch (...) {
        cudaStreamEndCapture(stream, &graph);
        if (graph != nullptr) cudaGraphDestroy(graph);
        throw;
    }
    CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
    const cudaError_t status = cudaGraphInstantiate(&executable, graph, 0);
    cudaGraphDestroy(graph);
    check_allocation(status, "cudaGraphInstantiate");
    CUDA_CHECK(cudaGraphUpload(executable, stream));
    graphs_[key] = executable;
    return executable;
}

void CudaProgram::prepare_windows() {
    const DeviceScope scope(card_->device());
    prepare();
    const int64_t most = usual_spans(limits_.context);
    for (int64_t spans = 1; spans <= most; spans *= 2) {
        for (const bool chooses : {false, true}) {
            graph_for({1, 1, chooses, spans, nullptr});
            if (partner_) graph_for({1, 1, chooses, spans, partner_->offer_place()});
        }
    }
}

void CudaProgram::enqueue_window(const WindowRun& run) {
    enqueue_state(run.stream);
    for (const std::unique_ptr<Step>& step : steps_) step->window(run);
    enqueue_end(run.num_logits, run.chooses, run.stream);
    cuda::FinishProblem finish{};
    finish.misses = misses_.as<cuda::MissState>();
    finish.words = host_tier_->words();
    finish.end = end_.as<cuda::WindowEnd>();
    finish.uses = table_->uses_on_card(0);
    finish.landed = table_->landing().as<uint32_t>();
    finish.num_uses = static_cast<int32_t>(table_->landing().nbytes / sizeof(uint32_t));
    finish.counter = counter_.as<uint32_t>();
    cuda::finish_window(finish, true, run.stream);
}

void CudaProgram::enqueue_state(cudaStream_t stream) {
    CUDA_CHECK(cudaMemcpyAsync(state_.data(), staged_state_.data(), sizeof(cuda::WindowState), cudaMemcpyHostToDevice, stream));
}

void CudaProgram::enqueue_end(int num_logits, bool chooses, cudaStream_t stream) {
    if (num_logits == 0) return;
    auto* parts = likeliest_parts_.as<cuda::LikeliestParts>();
    cuda::likeliest_window({logits_, limits_.vocab, parts, likeliest_.as<cuda::Likeliest>()}, num_logits, true, stream);
    if (!chooses) return;
    cuda::ChooseProblem choose{};
    choose.state = state();
    choose.logits = logits_;
    choose.parts = parts;
    choose.vocab = limits_.vocab;
    choose.changes = logit_changes_.as<LogitChange>();
    choose.changed = changed_logits_.as<float>();
    choose.scratch = choice_scratch_.as<cuda::ChoiceScratch>();
    choose.token = chosen_.as<int32_t>();
    cuda::choose_window(choose, true, stream);
}

// ---- prompts ----

void CudaProgram::run_prompt(std::span<const int32_t> tokens, int64_t position, int num_logits, const Chooser* chooser) {
    const cudaStream_t stream = card_->compute_stream();
    if (chooser) {
        *staged_state_.as<cuda::WindowState>() = {0, num_logits, position, {}, {}, chooser->rule()};
        enqueue_state(stream);
    }
    std::copy(tokens.begin(), tokens.end(), staged_tokens_.as<int32_t>());
    CUDA_CHECK(cudaMemcpyAsync(tokens_.data(), staged_tokens_.data(), tokens.size_bytes(), cudaMemcpyHostToDevice, stream));
    const PromptRun run{static_cast<int>(tokens.size()), num_logits, position, stream};
    for (const std::unique_ptr<Step>& step : steps_) {
        if (interrupted_.exchange(false, std::memory_order_relaxed)) {
            CUDA_CHECK(cudaStreamSynchronize(stream));
            throw Interrupted();
        }
        step->prompt(run);
    }
    enqueue_end(num_logits, chooser != nullptr, stream);
    table_->collect(stream);
    CUDA_CHECK(cudaStreamSynchronize(stream));
}

std::map<std::string, double> CudaProgram::profile(int32_t token, int64_t position, int repeats) {
    require(table_ != nullptr && table_->all_resident(), "only a window without misses can be profiled step by step");
    limits_.check(std::span(&token, 1), position, 1);
    const DeviceScope scope(card_->device());
    prepare();
    const cudaStream_t stream = card_->compute_stream();
    const cuda::WindowState state{1, 1, position, {}, {token}, {}};
    card_->write(state_, &state, sizeof state);
    std::vector<cudaEvent_t> marks(steps_.size() + 1);
    for (cudaEvent_t& mark : marks) CUDA_CHECK(cudaEventCreate(&mark));
    std::map<std::string, double> times_ms;
    for (int repeat = 0; repeat < repeats; repeat++) {
        for (size_t i = 0; i < steps_.size(); i++) {
            CUDA_CHECK(cudaEventRecord(marks[i], stream));
            steps_[i]->window({1, 1, false, usual_spans(position + 1), nullptr, false, stream});
        }
        CUDA_CHECK(cudaEventRecord(marks.back(), stream));
        CUDA_CHECK(cudaStreamSynchronize(stream));
        for (size_t i = 0; i < steps_.size(); i++) {
            float elapsed_ms = 0;
            CUDA_CHECK(cudaEventElapsedTime(&elapsed_ms, marks[i], marks[i + 1]));
            times_ms[steps_[i]->name()] += elapsed_ms / repeats;
        }
    }
    for (const cudaEvent_t mark : marks) cudaEventDestroy(mark);
    return times_ms;
}

// ---- results ----

std::span<const cuda::Likeliest> CudaProgram::likeliest() const {
    return {likeliest_.as<const cuda::Likeliest>(), static_cast<size_t>(num_logits_)};
}

std::optional<int32_t> CudaProgram::chosen() const {
    const int32_t token = *chosen_.as<const int32_t>();
    return chose_ && token != cuda::kNotChosen ? std::optional(token) : std::nullopt;
}

View CudaProgram::read_logits(int row) {
    require(row >= 0 && row < num_logits_, "the last run has no row " + std::to_string(row) + " of logits");
    const cudaStream_t stream = card_->compute_stream();
    CUDA_CHECK(cudaMemcpyAsync(read_.data(), logits_ + static_cast<int64_t>(row) * limits_.vocab, read_.nbytes,
                               cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    return read_;
}

}  // namespace tandem
