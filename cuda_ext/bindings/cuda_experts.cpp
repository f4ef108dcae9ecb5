// Routed experts of a window on a card, and the host tier that answers it, for tests.
#include <cuda_runtime.h>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <vector>

#include "cache/tier.h"
#include "cards/cuda_steps.h"
#include "cards/host_card.h"
#include "cards/host_tier.h"
#include "cuda_ops/down_window.h"
#include "cuda_ops/gate_up_window.h"
#include "device/check.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace tandem;

namespace {

template <class T, class... Shape>
using In = nb::ndarray<const T, Shape..., nb::c_contig, nb::device::cpu>;

constexpr size_t kGuard = 256;
constexpr int kSentinel = 0xa5;

// Bytes on the card between guards.
class OnCard {
  public:
    OnCard(const void* data, size_t nbytes) : nbytes_(nbytes) {
        CUDA_CHECK(cudaMalloc(&memory_, nbytes + 2 * kGuard));
        CUDA_CHECK(cudaMemset(memory_, kSentinel, nbytes + 2 * kGuard));
        if (data) CUDA_CHECK(cudaMemcpy(this->data(), data, nbytes, cudaMemcpyHostToDevice));
    }
    ~OnCard() { cudaFree(memory_); }
    OnCard(const OnCard&) = delete;
    OnCard& operator=(const OnCard&) = delete;

    uint8_t* data() const { return static_cast<uint8_t*>(memory_) + kGuard; }
    template <class T>
    T* as() const {
        return reinterpret_cast<T*>(data());
    }
    // Throws std::runtime_error where something was written beyond the bytes.
    void read(void* out) const {
        std::vector<uint8_t> all(nbytes_ + 2 * kGuard);
        CUDA_CHECK(cudaMemcpy(all.data(), memory_, all.size(), cudaMemcpyDeviceToHost));
        for (size_t i = 0; i < kGuard; i++)
            if (all[i] != kSentinel || all[kGuard + nbytes_ + i] != kSentinel)
                throw std::runtime_error("a kernel wrote beyond its output");
        std::memcpy(out, all.data() + kGuard, nbytes_);
    }

  private:
    void* memory_ = nullptr;
    size_t nbytes_;
};

// Zeroed host memory that the card sees.
class Mapped {
  public:
    explicit Mapped(size_t nbytes) {
        CUDA_CHECK(cudaHostAlloc(&memory_, nbytes, cudaHostAllocMapped));
        std::memset(memory_, 0, nbytes);
        CUDA_CHECK(cudaHostGetDevicePointer(&on_card_, memory_, 0));
    }
    ~Mapped() { cudaFreeHost(memory_); }
    Mapped(const Mapped&) = delete;
    Mapped& operator=(const Mapped&) = delete;

    std::byte* data() const { return static_cast<std::byte*>(memory_); }
    std::byte* on_card() const { return static_cast<std::byte*>(on_card_); }

  private:
    void* memory_ = nullptr;
    void* on_card_ = nullptr;
};

cuda::CardShape card_shape() {
    int device = 0;
    cudaDeviceProp properties{};
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    return {properties.multiProcessorCount, properties.sharedMemPerBlockOptin, properties.sharedMemPerMultiprocessor};
}

struct WindowCase {
    In<float, nb::ndim<2>> hidden;  // [rows, hidden]
    In<float, nb::ndim<1>> gamma;
    In<int64_t, nb::ndim<2>> sums;  // [rows, experts]
    In<int32_t, nb::ndim<1>> slots;
    In<uint8_t, nb::ndim<2>> slot_blobs;
    In<uint8_t, nb::ndim<2>> arena;
    BlobMatrix gate, up, down;
    int top_k;
    Gating gating;
    bool renormalise;
    float scale;
    float streamed_ratio;
    bool arena_on_card;
    bool every_block_polls;
    int num_layers;  // the same layer so often
    bool answered;   // else the window is aborted once it waits
};

// Launches the layers of a window.
void launch_layers(const WindowCase& c, cuda::GateUpProblem gate_up, cuda::DownProblem down, cudaStream_t stream) {
    const cuda::CardShape card = card_shape();
    for (int layer = 0; layer < c.num_layers; layer++) {
        gate_up.layer = down.layer = layer;
        cuda::gate_up_window(gate_up, card, true, stream);
        cuda::down_window(down, card, true, stream);
    }
}

// Runs on the host what belongs to the window, and returns when the card is through.
void serve(const WindowCase& c, HostTier& tier, Pool& pool, cudaStream_t stream) {
    if (!c.answered) {
        while (std::atomic_ref(*tier.post().sequence).load(std::memory_order_acquire) == 0) std::this_thread::yield();
        tier.abort();
        CUDA_CHECK(cudaStreamSynchronize(stream));
        return;
    }
    cudaError_t result = cudaSuccess;
    std::thread waiter([&] {
        result = cudaStreamSynchronize(stream);
        tier.end();
    });
    tier.serve(pool);
    waiter.join();
    CUDA_CHECK(result);
}

template <class T>
nb::ndarray<nb::numpy, T> fetched(const OnCard& memory, std::initializer_list<size_t> shape) {
    size_t num = 1;
    for (const size_t extent : shape) num *= extent;
    auto* values = new std::vector<T>(num);
    nb::capsule owner(values, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    memory.read(values->data());
    return {values->data(), shape, owner};
}

nb::dict experts_window(const WindowCase& c, HostCard& host) {
    const size_t rows = c.hidden.shape(0), width = c.hidden.shape(1), num_experts = c.sums.shape(1);
    const size_t blob_bytes = c.arena.shape(1), num_pairs = rows * c.top_k;
    const cuda::PostShape shape{static_cast<int32_t>(rows), c.top_k, static_cast<int32_t>(width)};
    const OnCard hidden(c.hidden.data(), c.hidden.nbytes()), gamma(c.gamma.data(), c.gamma.nbytes());
    const OnCard sums(c.sums.data(), c.sums.nbytes()), slots(c.slots.data(), c.slots.nbytes());
    const OnCard blobs(c.slot_blobs.data(), c.slot_blobs.nbytes()), h(nullptr, num_pairs * c.gate.rows * sizeof(float));
    const OnCard groups(nullptr, rows * static_cast<size_t>(groups_of(static_cast<int64_t>(width))) * sizeof(quant::ActGroup));
    const OnCard values(nullptr, c.hidden.nbytes());
    const std::vector<uint8_t> zeros(num_experts * sizeof(uint32_t) + kNumTiers * sizeof(uint64_t));
    const OnCard state(zeros.data(), sizeof(cuda::MissState)), uses(zeros.data(), num_experts * sizeof(uint32_t));
    const OnCard tier_rows(zeros.data(), kNumTiers * sizeof(uint64_t));
    const cuda::StreamedRatios ratios{c.streamed_ratio, 0.0f};
    const OnCard streamed(&ratios, sizeof ratios);
    const Mapped posts(HostTier::shared_bytes(shape)), arena(c.arena.nbytes() + 2 * kGuard);
    std::memcpy(arena.data() + kGuard, c.arena.data(), c.arena.nbytes());

    const View arena_view = View::of(Buffer::wrap(arena.data() + kGuard, c.arena.nbytes()), 0, c.arena.nbytes());
    const size_t shared_bytes = HostTier::shared_bytes(shape);
    const View post_view = View::of(Buffer::wrap(posts.data(), shared_bytes), 0, shared_bytes);
    const std::vector<HostTier::Layer> layers(c.num_layers, {arena_view, blob_bytes, c.gate, c.up, c.down});
    HostTier tier(shape, layers, post_view, host.isa());

    const cuda::Choice choice{sums.as<int64_t>(), static_cast<int32_t>(num_experts), c.top_k, c.gating, c.renormalise, c.scale};
    const cuda::ExpertPlaces places{
        slots.as<int32_t>(), nullptr,
        blobs.data(),        c.arena_on_card ? reinterpret_cast<const uint8_t*>(arena.on_card()) + kGuard : nullptr,
        blob_bytes,          streamed.as<cuda::StreamedRatios>()};
    cuda::GateUpProblem gate_up{};
    gate_up.num_rows = static_cast<int32_t>(rows);
    gate_up.hidden = hidden.as<float>();
    gate_up.gamma = gamma.as<float>();
    gate_up.eps = 1e-6f;
    gate_up.groups = groups.as<quant::ActGroup>();
    gate_up.values = values.as<float>();
    gate_up.choice = choice;
    gate_up.places = places;
    gate_up.gate = blob_part(c.gate);
    gate_up.up = blob_part(c.up);
    gate_up.h = h.as<float>();
    gate_up.posts[cuda::kHostSource] = tier.post();
    gate_up.state = state.as<cuda::MissState>();
    cuda::DownProblem down{};
    down.num_rows = gate_up.num_rows;
    down.choice = choice;
    down.places = places;
    down.down = blob_part(c.down);
    down.h = h.as<float>();
    down.hidden = hidden.as<float>();
    down.posts[cuda::kHostSource] = tier.post();
    down.words = tier.words();
    down.state = gate_up.state;
    down.uses = uses.as<uint32_t>();
    down.tier_rows = tier_rows.as<unsigned long long>();
    down.polling = c.every_block_polls ? cuda::Polling::every_block : cuda::Polling::one_block;
    {
        nb::gil_scoped_release released;
        cudaStream_t stream = nullptr;
        CUDA_CHECK(cudaDeviceSynchronize());
        CUDA_CHECK(cudaStreamCreate(&stream));
        tier.begin();
        launch_layers(c, gate_up, down, stream);
        serve(c, tier, host.pool(), stream);
        CUDA_CHECK(cudaStreamDestroy(stream));
    }
    std::vector<float> unused(num_pairs * c.gate.rows);
    h.read(unused.data());
    cuda::MissState left{};
    state.read(&left);
    nb::dict result;
    result["hidden"] = fetched<float>(hidden, {rows, width});
    result["uses"] = fetched<uint32_t>(uses, {num_experts});
    result["tier_rows"] = fetched<uint64_t>(tier_rows, {static_cast<size_t>(kNumTiers)});
    result["voided"] = left.voided != 0;
    result["posted"] = left.posted[cuda::kHostSource];
    result["host_posts"] = tier.num_posts();
    result["host_rows"] = tier.num_rows();
    return result;
}

nb::dict ring_plan(const cuda::RingPlan& plan) {
    nb::dict result;
    result["num_warps"] = plan.num_warps;
    result["num_stages"] = plan.num_stages;
    result["stage_rows"] = plan.stage_rows;
    result["stage_bytes"] = plan.stage_bytes;
    result["nbytes"] = plan.nbytes;
    return result;
}

// The plans of both kernels for a card that need not be there.
nb::tuple plan_experts_window(int num_rows, int num_experts, int top_k, const BlobMatrix& gate, const BlobMatrix& up,
                              const BlobMatrix& down, int num_multiprocessors, size_t block_shared_bytes,
                              size_t card_shared_bytes) {
    const cuda::CardShape card{num_multiprocessors, block_shared_bytes, card_shared_bytes};
    cuda::GateUpProblem first{};
    first.num_rows = num_rows;
    first.choice = {nullptr, num_experts, top_k, Gating::softmax, true, 1.0f};
    first.places.blob_bytes = down.offset + down.rows * down.row_bytes;
    first.gate = blob_part(gate);
    first.up = blob_part(up);
    cuda::DownProblem second{};
    second.num_rows = num_rows;
    second.choice = first.choice;
    second.places = first.places;
    second.down = blob_part(down);
    const cuda::GateUpPlan gate_up_plan = cuda::plan_gate_up(first, card);
    const cuda::DownPlan down_plan = cuda::plan_down(second, card);
    nb::dict gate_up = ring_plan(gate_up_plan.ring_plan), result = ring_plan(down_plan.ring_plan);
    gate_up["num_blocks"] = gate_up_plan.num_blocks;
    gate_up["rings"] = gate_up_plan.rings;
    gate_up["shared_bytes"] = gate_up_plan.shared_bytes;
    result["num_blocks"] = down_plan.num_blocks;
    result["rings"] = down_plan.rings;
    result["shared_bytes"] = down_plan.shared_bytes;
    result["block_columns"] = down_plan.block_columns;
    result["held_pairs"] = down_plan.held_pairs;
    return nb::make_tuple(gate_up, result);
}

// Where the parts of a post lie in the memory that a HostTier is given.
nb::dict offsets_of_post(int max_rows, int top_k, int hidden) {
    const cuda::PostShape shape{max_rows, top_k, hidden};
    const size_t nbytes = HostTier::shared_bytes(shape), channel_bytes = link::channel_bytes(shape.geometry());
    const std::shared_ptr<Buffer> memory = Buffer::allocate(nbytes);
    const link::Channel channel = link::Channel::in(memory->data(), shape.geometry());
    const cuda::MissPost post = cuda::MissPost::of(channel, channel);
    nb::dict offsets;
    const auto add = [&](const char* name, const void* part) {
        offsets[name] = static_cast<const std::byte*>(part) - memory->data();
    };
    add("sequence", post.sequence);
    add("done", post.done);
    add("request", post.request);
    add("experts", post.experts);
    add("pair_rows", post.pair_rows);
    add("groups", post.groups);
    add("values", post.values);
    add("rows", post.rows);
    offsets["ended"] = channel_bytes + offsetof(cuda::WindowWords, ended);
    offsets["nbytes"] = nbytes;
    return offsets;
}

}  // namespace

void bind_cuda_experts(nb::module_& module) {
    nb::class_<WindowCase>(module, "ExpertsWindowCase", "One run of gate_up_window and down_window.")
        .def(
            "__init__",
            [](WindowCase* self, In<float, nb::ndim<2>> hidden, In<float, nb::ndim<1>> gamma, In<int64_t, nb::ndim<2>> sums,
               In<int32_t, nb::ndim<1>> slots, In<uint8_t, nb::ndim<2>> slot_blobs, In<uint8_t, nb::ndim<2>> arena, BlobMatrix gate,
               BlobMatrix up, BlobMatrix down, int top_k, Gating gating, bool renormalise, float scale, float streamed_ratio,
               bool arena_on_card, bool every_block_polls, int num_layers, bool answered) {
                new (self) WindowCase{
                    hidden,     gamma,   sums,   slots,       slot_blobs, arena,          gate,          up,
                    down,       top_k,   gating, renormalise, scale,      streamed_ratio, arena_on_card, every_block_polls,
                    num_layers, answered};
            },
            nb::kw_only(), "hidden"_a, "gamma"_a, "sums"_a, "slots"_a, "slot_blobs"_a, "arena"_a, "gate"_a, "up"_a, "down"_a,
            "top_k"_a, "gating"_a, "renormalise"_a, "scale"_a, "streamed_ratio"_a, "arena_on_card"_a, "every_block_polls"_a,
            "num_layers"_a, "answered"_a);
    module.def("experts_window", &experts_window, "window"_a, "host"_a, "Runs the case; the host card's pool is the host tier.");
    module.def("plan_experts_window", &plan_experts_window, nb::kw_only(), "num_rows"_a, "num_experts"_a, "top_k"_a, "gate"_a,
               "up"_a, "down"_a, "num_multiprocessors"_a, "block_shared_bytes"_a, "card_shared_bytes"_a);
    module.def("post_offsets", &offsets_of_post, "max_rows"_a, "top_k"_a, "hidden"_a);

    nb::class_<HostTier>(module, "HostTier", "Answers the posts of a card's window.")
        .def(
            "__init__",
            [](HostTier* self, std::tuple<int, int, int> shape,
               std::vector<std::tuple<View, size_t, BlobMatrix, BlobMatrix, BlobMatrix>> layers, View post, const HostCard& host) {
                std::vector<HostTier::Layer> all;
                for (auto& [blobs, blob_bytes, gate, up, down] : layers) all.push_back({blobs, blob_bytes, gate, up, down});
                const auto [max_rows, top_k, hidden] = shape;
                new (self) HostTier({max_rows, top_k, hidden}, std::move(all), std::move(post), host.isa());
            },
            "shape"_a, "layers"_a, "post"_a, "host"_a)
        .def("begin", &HostTier::begin)
        .def(
            "serve", [](HostTier& tier, HostCard& host) { tier.serve(host.pool()); }, "host"_a,
            nb::call_guard<nb::gil_scoped_release>())
        .def("end", &HostTier::end)
        .def("abort", &HostTier::abort)
        .def_prop_ro("aborted", &HostTier::aborted)
        .def_prop_ro("num_posts", &HostTier::num_posts)
        .def_prop_ro("num_rows", &HostTier::num_rows);
}
