#include "cards/cuda_row_server.h"

#include <algorithm>
#include <chrono>

#include "base/require.h"
#include "cards/cuda_check.h"
#include "cards/cuda_driver.h"
#include "cards/cuda_steps.h"
#include "ops/activations.h"

namespace tandem {

namespace {

using std::chrono::microseconds;

constexpr microseconds kNap{200};      // while requests come
constexpr microseconds kSleep{4000};   // while none do; what is enqueued lasts longer
constexpr int kNapsBeforeSleep = 250;  // 50 ms
constexpr std::chrono::seconds kAnswerLimit{20};

View on_card(size_t nbytes) {
    return View::of(allocate_device(nbytes), 0, nbytes);
}

}  // namespace

CudaRowServer::CudaRowServer(CudaCard& card, const CudaExpertTable& table, const std::vector<HostTier::Layer>& layers,
                             const link::Geometry& geometry, const Requests& requests)
    : card_(card), requests_(requests) {
    const DeviceScope scope(card.device());
    require(geometry.max_rows == cuda::kMaxWindowRows, "a card answers requests of windows");
    const size_t num_pairs = static_cast<size_t>(geometry.max_rows) * geometry.top_k;
    int64_t width = 0;
    bool wants_values = false;
    for (const HostTier::Layer& layer : layers) {
        width = std::max(width, layer.gate.rows);
        wants_values = wants_values || quant::type_wants_values(layer.gate.type) || quant::type_wants_values(layer.up.type);
    }
    require(width > 0, "a server of rows needs layers");
    hidden_ = on_card(num_pairs * width * sizeof(float));
    state_ = on_card(sizeof(cuda::ServedState));
    counts_ = View::of(allocate_mapped(sizeof(cuda::ServedCounts)), 0, sizeof(cuda::ServedCounts));
    const std::vector<cuda::ServedLayer> served = plan(table, layers, static_cast<int>(geometry.top_k));
    layers_ = on_card(served.size() * sizeof(cuda::ServedLayer));
    card.write(layers_, served.data(), layers_.nbytes);
    cuda::size_launches(problem_, served);

    link::Channel asked = requests.asked;
    if (requests.fetches) {
        const size_t nbytes = link::channel_bytes(geometry);
        fetched_ = on_card(nbytes);
        asked = link::Channel::in(fetched_.data(), geometry);
        const void* end = wants_values ? static_cast<const void*>(asked.rows) : asked.values;
        const auto units_to = [&](const void* place) {
            return static_cast<int32_t>((static_cast<const std::byte*>(place) - reinterpret_cast<const std::byte*>(asked.request)) /
                                        16);
        };
        fetch_.num_units = fetch_.one_row_units = units_to(end);
        if (!wants_values) fetch_.one_row_units = units_to(asked.groups + groups_of(geometry.hidden));
        fetch_.from = reinterpret_cast<const uint4*>(requests.asked.request);
        fetch_.to = reinterpret_cast<uint4*>(asked.request);
    }
    problem_.post = cuda::MissPost::of(asked, requests.answered);
    problem_.layers = layers_.as<const cuda::ServedLayer>();
    problem_.num_layers = static_cast<int32_t>(layers.size());
    problem_.max_pairs = static_cast<int32_t>(num_pairs);
    problem_.max_experts = std::min(static_cast<int32_t>(geometry.num_experts), problem_.max_pairs);
    problem_.state = state_.as<cuda::ServedState>();
    problem_.counts = counts_.as<cuda::ServedCounts>();
    CUDA_CHECK(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, card.serving_priority()));
}

// For one row, and for as many as fit.
std::vector<cuda::ServedLayer> CudaRowServer::plan(const CudaExpertTable& table, const std::vector<HostTier::Layer>& layers,
                                                   int top_k) {
    std::vector<cuda::ServedLayer> served;
    const auto add_all = [&](int num_rows) {
        for (size_t number = 0; number < layers.size(); number++) {
            const HostTier::Layer& layer = layers[number];
            const cuda::ExpertPlaces places{table.slots_on_card(static_cast<int>(number)),
                                            nullptr,
                                            table.slot_base(layer.blob_bytes),
                                            card_.is_pinned(layer.blobs) ? layer.blobs.as<const uint8_t>() : nullptr,
                                            layer.blob_bytes,
                                            nullptr};
            const cuda::ServedShape shape{table.mirror().num_experts(), top_k,  blob_part(layer.gate), blob_part(layer.up),
                                          blob_part(layer.down),        places, hidden_.as<float>()};
            served.push_back(cuda::plan_served(shape, num_rows, card_.shape(), requests_.shares_card));
        }
    };
    add_all(1);
    for (problem_.max_rows = cuda::kMaxWindowRows; problem_.max_rows > 1; problem_.max_rows--) {
        try {
            add_all(problem_.max_rows);
            return served;
        } catch (const std::invalid_argument&) {
            served.resize(layers.size());
        }
    }
    add_all(1);
    return served;
}

CudaRowServer::~CudaRowServer() {
    try {
        stop();
    } catch (const CudaError&) {  // the card has failed: nothing is left to wait for
    }
    cudaStreamDestroy(stream_);
}

void CudaRowServer::start(uint32_t last) {
    require(!running(), "the server of rows runs already");
    enqueued_ = last;
    link::store(counts_.as<cuda::ServedCounts>()->answered, last);
    ending_ = failed_ = false;
    thread_ = std::thread([this] { work(); });
}

uint32_t CudaRowServer::stop() {
    if (!running()) return enqueued_;
    ending_ = true;
    thread_.join();
    release();
    return enqueued_;
}

// What waits for requests that will never come passes as requests without experts.
void CudaRowServer::release() {
    const DeviceScope scope(card_.device());
    const uint32_t none = 0;
    CUDA_CHECK(cudaMemcpyAsync(&requests_.asked.request->num_experts, &none, sizeof none, cudaMemcpyDefault, card_.copy_stream()));
    CUDA_CHECK(cudaMemcpyAsync(&requests_.asked.request->num_pairs, &none, sizeof none, cudaMemcpyDefault, card_.copy_stream()));
    CUDA_CHECK(cudaMemcpyAsync(&requests_.asked.words->seq, &enqueued_, sizeof enqueued_, cudaMemcpyDefault, card_.copy_stream()));
    CUDA_CHECK(cudaStreamSynchronize(card_.copy_stream()));
    CUDA_CHECK(cudaStreamSynchronize(stream_));
}

uint32_t CudaRowServer::answered() const {
    return link::load(counts_.as<const cuda::ServedCounts>()->answered);
}

void CudaRowServer::work() {
    const DeviceScope scope(card_.device());
    uint32_t seen = answered();
    int naps = 0;
    while (!ending_) {
        const uint32_t done = answered();
        const bool progresses = done != seen;
        naps = progresses ? 0 : naps + 1;
        seen = done;
        try {
            if (enqueued_ - done <= kDepth / 2)
                while (enqueued_ - done < kDepth) enqueue(++enqueued_);
        } catch (const std::exception&) {  // whoever waits for an answer finds out; the engine's own calls fail as well
            failed_ = true;
            return;
        }
        if (beat_ && (progresses || !is_behind(done))) beat_();
        std::this_thread::sleep_for(naps < kNapsBeforeSleep ? kNap : kSleep);
    }
}

void CudaRowServer::enqueue(uint32_t number) {
    const auto sequence = reinterpret_cast<CUdeviceptr>(&requests_.asked.words->seq);
    CUDA_DRIVER_CHECK(driver().stream_wait_value(stream_, sequence, number, CU_STREAM_WAIT_VALUE_GEQ));
    if (requests_.fetches) cuda::fetch_request(fetch_, stream_);
    cuda::serve_window(problem_, number, requests_.fetches, stream_);
}

void CudaRowServer::await(uint32_t number) const {
    const auto deadline = std::chrono::steady_clock::now() + kAnswerLimit;
    while (running() && !failed_ && static_cast<int32_t>(answered() - number) < 0) {
        if (std::chrono::steady_clock::now() > deadline) throw CudaError(cudaErrorUnknown, "a card does not answer any more");
        std::this_thread::yield();
    }
}

int64_t CudaRowServer::served_rows() const {
    return static_cast<int64_t>(std::atomic_ref(counts_.as<cuda::ServedCounts>()->rows).load(std::memory_order_relaxed));
}

int64_t CudaRowServer::late_experts() const {
    return static_cast<int64_t>(std::atomic_ref(counts_.as<cuda::ServedCounts>()->late_experts).load(std::memory_order_relaxed));
}

}  // namespace tandem
