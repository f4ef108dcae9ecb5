#include "link/link.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <algorithm>
#include <cstring>

#include "base/require.h"
#include "link/channel_words.h"
#include "link/wait.h"

namespace tandem::link {

namespace {

constexpr int kChecksApart = 256;  // turns of a waiting loop between two looks at the partner

bool same(const Geometry& a, const Geometry& b) {
    return std::memcmp(&a, &b, sizeof(Geometry)) == 0;
}

std::string padded(const std::string& fingerprint) {
    require(fingerprint.size() <= kFingerprintBytes, "a fingerprint has at most 64 characters");
    std::string text = fingerprint;
    text.resize(kFingerprintBytes, '\0');
    return text;
}

}  // namespace

size_t file_bytes(const Geometry& geometry) {
    require(
        geometry.num_layers > 0 && geometry.num_experts > 0 && geometry.top_k > 0 && geometry.max_rows > 0 && geometry.hidden > 0,
        "a link needs layers, experts, rows and hidden values");
    return Parts::in(nullptr, geometry).total_bytes;
}

void format(const View& file, const std::string& fingerprint, const Geometry& geometry) {
    require(file.nbytes == file_bytes(geometry), "the link file has not the size of its geometry");
    FileHeader& header = *file.as<FileHeader>();
    header.magic = kMagic;
    header.version = kVersion;
    std::memcpy(header.fingerprint, padded(fingerprint).data(), kFingerprintBytes);
    header.geometry = geometry;
    header.total_bytes = file.nbytes;
    store(header.state, static_cast<uint32_t>(FileState::ready));
}

Link::Link(View file, Options options, std::shared_ptr<ExpertTable> table)
    : file_(std::move(file)),
      options_(std::move(options)),
      table_(std::move(table)),
      role_(options_.role),
      partner_(1 - options_.role),
      pool_(options_.num_threads) {
    const Geometry& geometry = options_.geometry;
    require(role_ == 0 || role_ == 1, "a link has the roles 0 and 1");
    require(table_ != nullptr && table_->num_layers() == static_cast<int>(geometry.num_layers) &&
                table_->num_experts() == static_cast<int>(geometry.num_experts),
            "the residency table is not of the link's geometry");
    require(file_.nbytes == file_bytes(geometry), "the link file has not the size of its geometry");
    parts_ = Parts::in(file_.data(), geometry);
    const FileHeader& header = *parts_.header;
    require(load(header.state) == static_cast<uint32_t>(FileState::ready) && header.magic == kMagic && header.version == kVersion,
            "this is no link file of this version");
    require(std::memcmp(header.fingerprint, padded(options_.fingerprint).data(), kFingerprintBytes) == 0 &&
                same(header.geometry, geometry),
            "the link file is of another model or of other sizes; use one chunk and one model for both engines");
    asked_ = parts_.channels[role_];
    served_ = parts_.channels[partner_];
    layers_.resize(geometry.num_layers);
    row_places_.resize(geometry.max_rows);
    RoleWords& own = *parts_.roles[role_];
    store(own.serving, 0);
    begin_serving(*served_.words);
    table_->set_published(parts_.resident[role_]);
    store(own.num_attached, own.num_attached + 1);
    store(own.pid, static_cast<uint32_t>(getpid()));
}

Link::~Link() {
    close();
}

void Link::close() {
    if (ending_.exchange(true)) return;
    store(parts_.roles[role_]->serving, 0);
    wake(served_.words->seq);
    if (thread_.joinable()) thread_.join();
    table_->set_offered(nullptr);
    table_->set_published(nullptr);
    store(parts_.roles[role_]->pid, 0);
    if (partner_fd_ >= 0) ::close(partner_fd_);
    partner_fd_ = -1;
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
    store(parts_.roles[role_]->serving, serving);
}

bool Link::load_serving(int role) const {
    return load(parts_.roles[role]->serving) != 0;
}

// Asking

bool Link::partner_attached() const {
    return load(parts_.roles[partner_]->pid) != 0;
}

bool Link::begin_window(int num_rows) {
    const bool is_open = !ending_ && num_rows <= static_cast<int>(options_.geometry.max_rows) && load_serving(partner_) &&
                         may_ask(*asked_.words) && partner_attached();
    if (is_open) watch_partner();
    table_->set_offered(is_open ? parts_.resident[partner_] : nullptr);
    return is_open;
}

void Link::watch_partner() {
    const RoleWords& partner = *parts_.roles[partner_];
    const uint32_t attached = load(partner.num_attached);
    if (attached == partner_attached_ && partner_fd_ >= 0) return;
    if (partner_fd_ >= 0) ::close(partner_fd_);
    partner_fd_ = static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(load(partner.pid)), 0));
    partner_attached_ = attached;
}

void Link::ask(const ExpertsProblem& p) {
    copy_request(p);
    last_progress_ = std::chrono::steady_clock::now();
    last_beat_ = load(parts_.roles[partner_]->heartbeat);
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
        if (turns % kChecksApart == 0 && !partner_is_there()) return false;
    }
    return load(asked_.words->status) == static_cast<uint32_t>(Status::computed);
}

// It lives, is attached, and its thread makes progress: slow is not gone.
bool Link::partner_is_there() {
    const RoleWords& partner = *parts_.roles[partner_];
    pollfd exited{partner_fd_, POLLIN, 0};
    if (partner_fd_ < 0 || poll(&exited, 1, 0) == 1 || load(partner.pid) == 0) return is_answered(*asked_.words);
    const auto now = std::chrono::steady_clock::now();
    const uint32_t beat = load(partner.heartbeat);
    if (beat != last_beat_) {
        last_beat_ = beat;
        last_progress_ = now;
    }
    return std::chrono::duration<double>(now - last_progress_).count() < options_.stuck_after_s;
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
    beat();
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
    while (!changed_.wait_for(lock, std::chrono::milliseconds(10), [&] { return num_holders_ == 0; })) beat();  // held, not stuck
    computing_ = true;
}

void Link::end_computing() {
    {
        std::lock_guard lock(mutex_);
        computing_ = false;
    }
    changed_.notify_all();
    beat();
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
    pool_.run([&](Worker& worker) { expert_rows(worker, problem, expert.count); });
    return found.tier == Tier::own ? 0 : 1;
}

void Link::beat() {
    uint32_t& heartbeat = parts_.roles[role_]->heartbeat;
    store(heartbeat, heartbeat + 1);
}

}  // namespace tandem::link
