#include "link/link.h"

#include <algorithm>
#include <chrono>

#include "base/require.h"
#include "link/channel_words.h"
#include "link/wait.h"

namespace tandem::link {

namespace {

constexpr int kChecksApart = 256;  // turns of a waiting loop between two looks at the partner

}  // namespace

Link::Link(View file, Options options, std::shared_ptr<ExpertTable> table)
    : options_(std::move(options)),
      table_(std::move(table)),
      presence_(std::move(file), options_.role, options_.fingerprint, options_.geometry, options_.stuck_after_s),
      asked_(presence_.asked()),
      served_(presence_.served()),
      pool_(options_.num_threads) {
    const Geometry& geometry = options_.geometry;
    require(table_ != nullptr && table_->num_layers() == static_cast<int>(geometry.num_layers) &&
                table_->num_experts() == static_cast<int>(geometry.num_experts),
            "the residency table is not of the link's geometry");
    layers_.resize(geometry.num_layers);
    row_places_.resize(geometry.max_rows);
    table_->set_published(presence_.resident());
    presence_.arrive();
}

Link::~Link() {
    close();
}

void Link::close() {
    if (ending_.exchange(true)) return;
    presence_.set_serving(false);
    wake(served_.words->seq);
    if (thread_.joinable()) thread_.join();
    table_->set_offered(nullptr);
    table_->set_published(nullptr);
    presence_.leave();
}

void Link::set_layer(int layer, const BlobMatrix& gate, const BlobMatrix& up, const BlobMatrix& down) {
    const size_t blob_bytes = table_->blob(layer, 0).nbytes;
    for (const BlobMatrix* matrix : {&gate, &up, &down})
        require(matrix->offset + matrix->rows * matrix->row_bytes <= blob_bytes, "link: a matrix ends behind its blob");
    const int64_t hidden = options_.geometry.hidden;
    require(
        gate.columns == hidden && up.columns == hidden && down.rows == hidden && gate.rows == up.rows && down.columns == gate.rows,
        "link: gate, up and down do not fit together");
    layers_[layer] = {gate, up, down};
}

void Link::serve(bool serving) {
    require(!ending_, "the link is closed");
    for (const Layer& layer : layers_) require(layer.gate.rows > 0, "link: a layer has no matrices yet");
    if (serving && !thread_.joinable()) thread_ = std::thread([this] { work(); });
    presence_.set_serving(serving);
}

// Asking

bool Link::begin_window(int num_rows) {
    const bool is_open = !ending_ && num_rows <= static_cast<int>(options_.geometry.max_rows) && presence_.may_ask_partner();
    table_->set_offered(is_open ? presence_.partner_resident() : nullptr);
    return is_open;
}

void Link::ask(const ExpertsProblem& p) {
    copy_request(p);
    presence_.expect_partner();
    post(*asked_.words);
    wake(asked_.words->seq);
}

void Link::copy_request(const ExpertsProblem& p) {
    awaited_.clear();
    awaited_firsts_.clear();
    std::fill(row_places_.begin(), row_places_.end(), -1);
    const int64_t width = p.x.width, groups = groups_of(width);
    uint32_t num_rows = 0, num_pairs = 0;
    for (int i = 0; i < *p.routed.num_linked; i++) {
        const ExpertRows& expert = p.routed.linked(i);
        awaited_.push_back({static_cast<uint32_t>(expert.expert), num_pairs, static_cast<uint32_t>(expert.count)});
        awaited_firsts_.push_back(expert.first);
        for (int pair = 0; pair < expert.count; pair++) {
            const int32_t row = p.routed.order[expert.first + pair] / p.routed.top_k;
            if (row_places_[row] < 0) {
                row_places_[row] = static_cast<int32_t>(num_rows);
                std::copy_n(p.x.values + row * width, width, asked_.values + num_rows * width);
                if (p.x.groups) std::copy_n(p.x.groups + row * groups, groups, asked_.groups + num_rows * groups);
                num_rows++;
            }
            asked_.pair_rows[num_pairs++] = row_places_[row];
        }
    }
    std::copy(awaited_.begin(), awaited_.end(), asked_.experts);
    *asked_.request = {static_cast<uint32_t>(p.layer), num_rows, static_cast<uint32_t>(awaited_.size()), num_pairs};
}

void Link::collect(const ExpertsProblem& p) {
    if (!await_rows()) {
        num_losses_.fetch_add(1, std::memory_order_relaxed);
        table_->set_offered(nullptr);
        lost_.store(true);
        return;
    }
    const int64_t width = p.down.rows;
    for (size_t i = 0; i < awaited_.size(); i++)
        std::copy_n(asked_.rows + awaited_[i].first * width, awaited_[i].count * width, p.expert_rows + awaited_firsts_[i] * width);
}

bool Link::await_rows() {
    for (int spins = 0, turns = 1; !is_answered(*asked_.words); turns++) {
        rest(spins);
        if (turns % kChecksApart == 0 && !presence_.partner_is_there()) return false;
    }
    return load(asked_.words->status) == static_cast<uint32_t>(Status::computed);
}

// Serving

void Link::hold() {
    std::unique_lock lock(mutex_);
    num_holders_++;
    changed_.wait(lock, [&] { return !computing_; });
}

void Link::release() {
    {
        std::lock_guard lock(mutex_);
        num_holders_--;
    }
    changed_.notify_all();
}

void Link::work() {
    int spins = 0;
    while (true) {
        if (has_request(*served_.words)) {
            answer_request();
            spins = 0;
        } else if (ending_) {
            return;
        } else {
            idle(spins);
        }
    }
}

void Link::idle(int& spins) {
    presence_.beat();
    const uint32_t seq = load(served_.words->seq);
    if (spins < kRestsBeforeSleep) {
        rest(spins);
    } else if (seq == served_.words->done && !ending_) {
        sleep_on(served_.words->seq, seq);
    }
}

void Link::answer_request() {
    const Request request = *served_.request;
    if (!request_is_sound(request)) {
        answer(*served_.words, Status::refused, 0);
        return;
    }
    uint32_t late = 0;
    for (uint32_t i = 0; i < request.num_experts; i++) {
        begin_computing();
        late += compute(static_cast<int>(request.layer), served_.experts[i]);
        end_computing();
    }
    served_rows_.fetch_add(request.num_pairs, std::memory_order_relaxed);
    late_experts_.fetch_add(late, std::memory_order_relaxed);
    answer(*served_.words, Status::computed, late);
}

void Link::begin_computing() {
    std::unique_lock lock(mutex_);
    while (!changed_.wait_for(lock, std::chrono::milliseconds(10), [&] { return num_holders_ == 0; }))
        presence_.beat();  // held, not stuck
    computing_ = true;
}

void Link::end_computing() {
    {
        std::lock_guard lock(mutex_);
        computing_ = false;
    }
    changed_.notify_all();
    presence_.beat();
}

// What the other process wrote is checked, so that a broken one cannot make this one read or write astray.
bool Link::request_is_sound(const Request& request) const {
    const Geometry& geometry = options_.geometry;
    if (request.layer >= geometry.num_layers || request.num_rows > geometry.max_rows ||
        request.num_pairs > geometry.max_rows * geometry.top_k || request.num_experts > geometry.num_experts ||
        request.num_experts > request.num_pairs)
        return false;
    for (uint32_t pair = 0; pair < request.num_pairs; pair++)
        if (static_cast<uint32_t>(served_.pair_rows[pair]) >= request.num_rows) return false;
    for (uint32_t i = 0; i < request.num_experts; i++) {
        const RequestExpert& expert = served_.experts[i];
        if (expert.expert >= geometry.num_experts || expert.count > request.num_pairs ||
            expert.first > request.num_pairs - expert.count)
            return false;
    }
    return true;
}

// The rows of one expert. Returns 1 if it was no longer in a slot, else 0.
uint32_t Link::compute(int layer, const RequestExpert& expert) {
    const ExpertTable::Found found = table_->find_own(layer, static_cast<int>(expert.expert));
    const Layer& matrices = layers_[layer];
    const int64_t hidden = options_.geometry.hidden, width = matrices.gate.rows;
    ExpertRows list{found.blob, static_cast<int32_t>(expert.expert), 0, static_cast<int32_t>(expert.count)};
    int32_t one = 1;
    hidden_.resize(std::max(hidden_.size(), static_cast<size_t>(expert.count) * width));
    hidden_groups_.resize(std::max(hidden_groups_.size(), static_cast<size_t>(expert.count) * groups_of(width)));
    ExpertsProblem problem{};
    problem.gate = matrices.gate;
    problem.up = matrices.up;
    problem.down = matrices.down;
    problem.x = {served_.values, hidden % 32 == 0 ? served_.groups : nullptr, hidden};
    problem.hidden = hidden_.data();
    problem.hidden_groups = quant::type_wants_values(matrices.down.type) ? nullptr : hidden_groups_.data();
    problem.routed.order = served_.pair_rows + expert.first;
    problem.routed.experts = &list;
    problem.routed.num_experts = &one;
    problem.routed.top_k = 1;  // pair_rows are rows already
    problem.expert_rows = served_.rows + expert.first * hidden;
    problem.row_kernels = &quant::row_kernels(options_.isa);
    problem.vector_kernels = &vector_kernels(options_.isa);
    expert_rows(pool_, problem);
    return found.tier == Tier::own ? 0 : 1;
}

}  // namespace tandem::link
