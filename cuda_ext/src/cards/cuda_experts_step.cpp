#include "cards/cuda_experts_step.h"

#include <algorithm>
#include <string>

#include "base/require.h"
#include "cards/cuda_check.h"
#include "cuda_ops/down_window.h"
#include "cuda_ops/gate_up_window.h"

namespace tandem {

namespace {

View pinned(size_t nbytes) {
    return View::of(allocate_mapped(nbytes), 0, nbytes);
}

cuda::PromptMatrix prompt_matrix(const BlobMatrix& matrix) {
    return {matrix.type, matrix.offset, static_cast<int32_t>(matrix.rows), static_cast<int32_t>(matrix.columns), matrix.row_bytes};
}

cudaEvent_t new_event() {
    cudaEvent_t event = nullptr;
    CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return event;
}

}  // namespace

// ---- the ring ----

ExpertRing::ExpertRing(CudaCard& card, View memory, int num_experts)
    : card_(card),
      memory_(std::move(memory)),
      counts_(pinned(num_experts * sizeof(int32_t))),
      staged_(pinned(num_experts * sizeof(ExpertRows))),
      staged_counts_(pinned(num_experts * sizeof(int32_t))),
      routed_(new_event()) {
    CUDA_CHECK(cudaStreamCreateWithFlags(&from_peer_, cudaStreamNonBlocking));
    for (int buffer = 0; buffer < kBuffers; buffer++) {
        filled_[buffer] = new_event();
        peer_filled_[buffer] = new_event();
        released_[buffer] = new_event();
    }
}

ExpertRing::~ExpertRing() {
    cudaStreamDestroy(from_peer_);
    cudaEventDestroy(routed_);
    for (int buffer = 0; buffer < kBuffers; buffer++) {
        cudaEventDestroy(filled_[buffer]);
        cudaEventDestroy(peer_filled_[buffer]);
        cudaEventDestroy(released_[buffer]);
    }
}

int ExpertRing::capacity(size_t blob_bytes) const {
    const int capacity = static_cast<int>(memory_.nbytes / kBuffers / blob_bytes);
    require(capacity >= 1, "the ring of streamed experts is smaller than " + std::to_string(kBuffers) + " blobs of " +
                               std::to_string(blob_bytes) + " bytes");
    return capacity;
}

std::byte* ExpertRing::place(int buffer, size_t blob_bytes, int index) const {
    constexpr size_t kAlignment = 256;
    const size_t buffer_bytes = memory_.nbytes / kBuffers / kAlignment * kAlignment;
    return memory_.data() + buffer * buffer_bytes + index * blob_bytes;
}

void ExpertRing::begin(int buffer) {
    CUDA_CHECK(cudaStreamWaitEvent(card_.copy_stream(), released_[buffer], 0));
    CUDA_CHECK(cudaStreamWaitEvent(from_peer_, released_[buffer], 0));
}

void ExpertRing::copy_from_arena(std::byte* to, const View& blob) {
    card_.enqueue_copy(to, blob);
}

void ExpertRing::copy_from_peer(std::byte* to, const View& slot) {
    CUDA_CHECK(cudaMemcpyAsync(to, slot.data(), slot.nbytes, cudaMemcpyDefault, from_peer_));
}

void ExpertRing::landed(int buffer) {
    CUDA_CHECK(cudaEventRecord(peer_filled_[buffer], from_peer_));
    CUDA_CHECK(cudaStreamWaitEvent(card_.compute_stream(), peer_filled_[buffer], 0));
    CUDA_CHECK(cudaEventRecord(filled_[buffer], card_.copy_stream()));
    CUDA_CHECK(cudaStreamWaitEvent(card_.compute_stream(), filled_[buffer], 0));
}

void ExpertRing::release(int buffer) {
    CUDA_CHECK(cudaEventRecord(released_[buffer], card_.compute_stream()));
}

void ExpertRing::await_router() {
    CUDA_CHECK(cudaEventRecord(routed_, card_.compute_stream()));
    CUDA_CHECK(cudaEventSynchronize(routed_));
}

// ---- the step ----

ExpertsStep::ExpertsStep(CudaProgram& program, std::shared_ptr<CudaExpertTable> table, std::shared_ptr<ExpertRing> ring, int layer,
                         const Norm& norm, const cuda::Choice& choice, const Parts& parts, const ExpertsMemory& memory)
    : program_(program),
      table_(std::move(table)),
      ring_(std::move(ring)),
      layer_(layer),
      norm_(norm),
      choice_(choice),
      parts_(parts),
      memory_(memory) {}

cuda::ExpertPlaces ExpertsStep::places(const uint8_t* offered) const {
    const View first = table_->mirror().blob(layer_, 0);
    const size_t layer_bytes = first.nbytes * choice_.num_experts;
    const bool in_place = program_.card().is_pinned(View::of(first.buffer, first.offset, layer_bytes));
    return {table_->slots_on_card(layer_),
            offered ? offered + static_cast<size_t>(layer_) * choice_.num_experts : nullptr,
            table_->slot_base(first.nbytes),
            in_place ? first.as<const uint8_t>() : nullptr,
            first.nbytes,
            &program_.state()->streamed};
}

void ExpertsStep::window(const WindowRun& run) const {
    const cuda::CardShape& card = program_.card().shape();
    cuda::GateUpProblem gate_up{};
    gate_up.num_rows = run.num_rows;
    gate_up.hidden = norm_.x;
    gate_up.gamma = norm_.gamma;
    gate_up.eps = norm_.eps;
    gate_up.groups = norm_.groups;
    gate_up.values = norm_.values;
    gate_up.choice = choice_;
    gate_up.places = places(run.offered);
    gate_up.gate = blob_part(parts_.gate);
    gate_up.up = blob_part(parts_.up);
    gate_up.h = memory_.hidden_rows;
    gate_up.layer = layer_;
    std::copy_n(program_.posts(), cuda::kNumSources, gate_up.posts);
    gate_up.state = program_.misses();
    cuda::gate_up_window(gate_up, card, true, run.stream);

    cuda::DownProblem down{};
    down.num_rows = run.num_rows;
    down.choice = choice_;
    down.places = gate_up.places;
    down.down = blob_part(parts_.down);
    down.h = memory_.hidden_rows;
    down.hidden = memory_.hidden;
    std::copy_n(program_.posts(), cuda::kNumSources, down.posts);
    down.words = program_.words();
    down.leaves_room = run.leaves_room;
    down.state = program_.misses();
    down.layer = layer_;
    down.uses = table_->uses_on_card(layer_);
    down.tier_rows = table_->tier_rows_on_card();
    cuda::down_window(down, card, true, run.stream);
}

cuda::ExpertsPromptProblem ExpertsStep::prompt_problem() const {
    cuda::ExpertsPromptProblem problem{};
    problem.gate = prompt_matrix(parts_.gate);
    problem.up = prompt_matrix(parts_.up);
    problem.down = prompt_matrix(parts_.down);
    problem.routed = memory_.routed;
    problem.x = memory_.x;
    problem.products = memory_.hidden_rows;
    problem.halves = memory_.halves;
    problem.expert_rows = memory_.expert_rows;
    problem.hidden = memory_.hidden;
    return problem;
}

void ExpertsStep::prompt(const PromptRun& run) const {
    const cuda::ExpertPlaces places = this->places(nullptr);
    cuda::RoutePromptProblem route{};
    route.sums = choice_.sums;
    route.inverse = norm_.inverse;
    route.gating = choice_.gating;
    route.renormalise = choice_.renormalise;
    route.scale = choice_.scale;
    route.routed = memory_.routed;
    route.residency = {places.slots, places.slot_base, places.blob_bytes, table_->uses_on_card(layer_),
                       table_->tier_rows_on_card()};
    route.resident = memory_.list;
    cuda::route_prompt(route, run.num_rows, run.stream);
    const cuda::ExpertsPromptProblem problem = prompt_problem();
    const int num_pairs = run.num_rows * choice_.top_k;
    const bool all_resident = table_->num_resident(layer_) == choice_.num_experts;
    if (!all_resident)
        CUDA_CHECK(cudaMemcpyAsync(ring_->counts(), memory_.routed.counts, choice_.num_experts * sizeof(int32_t),
                                   cudaMemcpyDeviceToHost, run.stream));
    if (!all_resident) ring_->await_router();
    compute(problem, num_pairs, choice_.num_experts, run.stream);
    if (!all_resident) stream_missing(problem, run);
    cuda::experts_combine_prompt(problem, run.num_rows, run.stream);
}

void ExpertsStep::compute(const cuda::ExpertsPromptProblem& problem, int num_pairs, int num_experts, cudaStream_t stream) const {
    const int max_tiles = cuda::max_row_tiles(num_pairs, num_experts);
    cuda::experts_gate_up_prompt(problem, memory_.list, max_tiles, stream);
    cuda::experts_down_prompt(problem, memory_.list, max_tiles, stream);
}

void ExpertsStep::stream_missing(const cuda::ExpertsPromptProblem& problem, const PromptRun& run) const {
    std::vector<ExpertRows> missing;
    int32_t first = 0;
    for (int expert = 0; expert < choice_.num_experts; expert++) {
        const int32_t count = ring_->counts()[expert];
        if (count > 0 && table_->mirror().entry(layer_, expert) == ExpertTable::kAbsent)
            missing.push_back({nullptr, expert, first, count});
        first += count;
    }
    for (size_t begin = 0; begin < missing.size();) begin = stream_batch(problem, missing, begin, run.stream);
}

// The second card's slot is nearer than the arena. It holds what the table says until the run has ended.
void ExpertsStep::fetch(std::byte* place, const ExpertRows& rows) const {
    const View* slot = table_->slot_in_reach(layer_, rows.expert);
    const View blob = table_->mirror().blob(layer_, rows.expert);
    if (slot)
        ring_->copy_from_peer(place, *slot);
    else
        ring_->copy_from_arena(place, blob);
    table_->note_copied(blob.nbytes, rows.count, slot != nullptr);
}

size_t ExpertsStep::stream_batch(const cuda::ExpertsPromptProblem& problem, const std::vector<ExpertRows>& missing, size_t begin,
                                 cudaStream_t stream) const {
    const size_t blob_bytes = table_->mirror().blob(layer_, 0).nbytes;
    const int buffer = ring_->next_buffer;
    ring_->next_buffer = (buffer + 1) % ExpertRing::kBuffers;
    const size_t end = std::min(missing.size(), begin + ring_->capacity(blob_bytes));
    int num_pairs = 0;
    ring_->begin(buffer);
    for (size_t i = begin; i < end; i++) {
        std::byte* place = ring_->place(buffer, blob_bytes, static_cast<int>(i - begin));
        fetch(place, missing[i]);
        ring_->staged()[i] = missing[i];
        ring_->staged()[i].blob = reinterpret_cast<const uint8_t*>(place);
        num_pairs += missing[i].count;
    }
    ring_->landed(buffer);
    const int num_experts = static_cast<int>(end - begin);
    ring_->staged_counts()[begin] = num_experts;
    CUDA_CHECK(cudaMemcpyAsync(memory_.list.experts, ring_->staged() + begin, num_experts * sizeof(ExpertRows),
                               cudaMemcpyHostToDevice, stream));
    CUDA_CHECK(
        cudaMemcpyAsync(memory_.list.num_experts, ring_->staged_counts() + begin, sizeof(int32_t), cudaMemcpyHostToDevice, stream));
    cuda::list_tiles_prompt(memory_.list, stream);
    compute(problem, num_pairs, num_experts, stream);
    ring_->release(buffer);
    return end;
}

}  // namespace tandem
