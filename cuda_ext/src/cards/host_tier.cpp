#include "cards/host_tier.h"

#include <algorithm>
#include <string>
#include <thread>

#include "base/require.h"
#include "ops/activations.h"

#ifdef TANDEM_X86
#include <immintrin.h>
#endif

namespace tandem {

namespace {

constexpr int kPauses = 2000;        // about 20 us: longer than a layer without a post takes
constexpr int kTurnsPerLook = 1024;  // of a waiting loop between two calls of the watch

// The card writes and reads these words too.
uint32_t load(uint32_t& word) {
    return std::atomic_ref(word).load(std::memory_order_acquire);
}
void store(uint32_t& word, uint32_t value) {
    std::atomic_ref(word).store(value, std::memory_order_release);
}

void check(const cuda::PostShape& shape, const HostTier::Layer& layer) {
    require(layer.blob_bytes > 0 && layer.blobs.nbytes % layer.blob_bytes == 0, "a layer's memory is not whole blobs");
    for (const BlobMatrix* matrix : {&layer.gate, &layer.up, &layer.down})
        require(matrix->offset + matrix->rows * matrix->row_bytes <= layer.blob_bytes,
                "a matrix ends behind its blob of " + std::to_string(layer.blob_bytes) + " bytes");
    require(layer.gate.columns == shape.hidden && layer.up.columns == shape.hidden && layer.down.rows == shape.hidden &&
                layer.gate.rows == layer.up.rows && layer.down.columns == layer.gate.rows,
            "gate, up and down do not fit together");
}

}  // namespace

size_t HostTier::shared_bytes(const cuda::PostShape& shape) {
    return link::channel_bytes(shape.geometry()) + sizeof(cuda::WindowWords);
}

HostTier::HostTier(const cuda::PostShape& shape, std::vector<Layer> layers, View shared, quant::Isa isa)
    : shape_(shape), layers_(std::move(layers)), memory_(std::move(shared)), kernels_(&quant::row_kernels(isa)) {
    require(shape.max_rows >= 1 && shape.top_k >= 1 && shape.hidden >= 1 && shape.hidden % 32 == 0,
            "a host tier needs rows of a multiple of 32 values");
    require(memory_.nbytes >= shared_bytes(shape),
            "posts need " + std::to_string(shared_bytes(shape)) + " bytes of memory, but got " + std::to_string(memory_.nbytes));
    int64_t width = 0;
    for (const Layer& layer : layers_) {
        check(shape, layer);
        width = std::max(width, layer.gate.rows);
    }
    const link::Channel channel = link::Channel::in(memory_.data(), shape.geometry());
    post_ = cuda::MissPost::of(channel, channel);
    words_ = reinterpret_cast<cuda::WindowWords*>(memory_.data() + link::channel_bytes(shape.geometry()));
    const size_t num_pairs = static_cast<size_t>(shape.max_rows) * shape.top_k;
    experts_.resize(num_pairs);
    hidden_.resize(num_pairs * width);
    hidden_groups_.resize(num_pairs * groups_of(width));
}

void HostTier::begin() {
    answered_ = load(*post_.sequence);
    store(*post_.done, answered_);
    store(words_->abort, 0);
    store(words_->ended, 0);
}

void HostTier::serve(Pool& pool) {
    while (await_post()) {
        expert_rows(pool, problem_);
        publish();
    }
}

void HostTier::await_end() {
    for (int turns = 0; !aborted() && load(words_->ended) == 0; rest(turns)) {
    }
}

void HostTier::rest(int& turns) {
    if (++turns % kTurnsPerLook == 0 && watch_) watch_();
    if (turns >= kPauses) return std::this_thread::yield();
#ifdef TANDEM_X86
    _mm_pause();
#endif
}

void HostTier::end() {
    store(words_->ended, 1);
}

void HostTier::abort() {
    store(words_->abort, 1);
}

bool HostTier::aborted() const {
    return load(words_->abort) != 0;
}

bool HostTier::await_post() {
    for (int turns = 0; !aborted(); rest(turns)) {
        if (load(*post_.sequence) != answered_) {
            read_post();
            return true;
        }
        if (load(words_->ended) != 0) return false;
    }
    return false;
}

void HostTier::read_post() {
    const link::Request& request = *post_.request;
    const Layer& layer = layers_[request.layer];
    for (uint32_t i = 0; i < request.num_experts; i++) {
        const link::RequestExpert& posted = post_.experts[i];
        experts_[i] = {layer.blobs.as<const uint8_t>() + posted.expert * layer.blob_bytes, static_cast<int32_t>(posted.expert),
                       static_cast<int32_t>(posted.first), static_cast<int32_t>(posted.count)};
    }
    num_experts_ = static_cast<int32_t>(request.num_experts);
    Routed routed{};
    routed.order = post_.pair_rows;
    routed.experts = experts_.data();
    routed.num_experts = &num_experts_;
    routed.top_k = 1;  // pair_rows are rows already
    problem_.gate = layer.gate;
    problem_.up = layer.up;
    problem_.down = layer.down;
    problem_.routed = routed;
    problem_.x = {post_.values, post_.groups, shape_.hidden};
    problem_.hidden = hidden_.data();
    problem_.hidden_groups = quant::type_wants_values(layer.down.type) ? nullptr : hidden_groups_.data();
    problem_.expert_rows = post_.rows;
    problem_.row_kernels = kernels_;
}

void HostTier::publish() {
    answered_ = load(*post_.sequence);
    num_posts_.fetch_add(1, std::memory_order_relaxed);
    num_rows_.fetch_add(post_.request->num_pairs, std::memory_order_relaxed);
    if (!aborted()) store(*post_.done, answered_);
}

}  // namespace tandem
