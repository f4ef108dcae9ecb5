// Computes rows of experts on a CUDA card for somebody else: the engine whose second card it is, or another engine.
//
// Nothing of this waits for a thread while requests come: a stream has, enqueued ahead, for each request to come
//     wait for its number -> (fetch it) -> gate and up -> down, rows, `done`
// and a thread only adds to that.
#pragma once
#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "cards/cuda_card.h"
#include "cards/host_tier.h"
#include "cuda_ops/serve_window.h"
#include "link/channel_words.h"

namespace tandem {

// Thread rule: confined to the engine loop; `settle` and the counters by any thread.
class CudaRowServer {
  public:
    struct Requests {
        link::Channel asked;     // where the other side writes, at addresses that `card` can read
        link::Channel answered;  // where rows and `done` go, at addresses that it can write
        bool fetches;            // the requests lie in host memory: a kernel copies them to the card first
        bool shares_card;        // windows run on the card, too
    };

    // `table`: of `card`, whose slots and arena are read. `layers`: as recorded; all of them. `geometry`: of the channels, for
    // windows. Throws std::invalid_argument for layers whose kernels do not fit the card, std::bad_alloc.
    CudaRowServer(CudaCard& card, const CudaExpertTable& table, const std::vector<HostTier::Layer>& layers,
                  const link::Geometry& geometry, const Requests& requests);
    ~CudaRowServer();
    CudaRowServer(const CudaRowServer&) = delete;
    CudaRowServer& operator=(const CudaRowServer&) = delete;

    // Called by the server's thread from time to time while it runs, but not while the card leaves a request unanswered. Requests
    // must lie in host memory.
    void set_beat(std::function<void()> beat) { beat_ = std::move(beat); }

    // Answers what is asked from here on. `last`: the number of the last request that is answered already.
    void start(uint32_t last);
    // Returns when nothing is enqueued any more, with the number that the next request comes after. Nobody may ask meanwhile.
    // Idempotent.
    uint32_t stop();
    bool running() const { return thread_.joinable(); }

    // Returns when request `number` has been answered. Throws CudaError if it is not within a long time.
    void await(uint32_t number) const;
    // The same for the request that is there when it is called, if any. Requests must lie in host memory.
    void settle() const { await(link::load(requests_.asked.words->seq)); }

    int64_t served_rows() const;
    int64_t late_experts() const;
    // Most that a request may have.
    int max_rows() const { return problem_.max_rows; }

  private:
    static constexpr uint32_t kDepth = 128;  // requests that are enqueued ahead: some windows' worth

    std::vector<cuda::ServedLayer> plan(const CudaExpertTable& table, const std::vector<HostTier::Layer>& layers, int top_k);
    void work();
    void enqueue(uint32_t number);
    uint32_t answered() const;
    bool is_behind(uint32_t done) const { return static_cast<int32_t>(link::load(requests_.asked.words->seq) - done) > 0; }
    void release();

    CudaCard& card_;
    Requests requests_;
    View layers_;
    View hidden_;
    View state_;
    View counts_;   // mapped
    View fetched_;  // a channel on the card
    cuda::RequestFetch fetch_{};
    cuda::ServeProblem problem_{};
    cudaStream_t stream_ = nullptr;
    std::function<void()> beat_;
    std::thread thread_;
    std::atomic<bool> ending_{false};
    std::atomic<bool> failed_{false};
    uint32_t enqueued_ = 0;
};

}  // namespace tandem
