// The host tier of a card: answers the posts of a window (cuda_ops/miss_post.h) with rows that the pool computes from the arena.
#pragma once
#include <atomic>
#include <functional>
#include <vector>

#include "base/buffer.h"
#include "cuda_ops/miss_post.h"
#include "ops/experts.h"
#include "pool/pool.h"
#include "quant/row.h"

namespace tandem {

// A window's life here: `begin`; the window is launched; `serve` on one thread until the card or `end` says that the window is
// through, or `abort` that it is given up; then the caller waits for the card.
//
// Thread rule: `begin` and `serve` by the thread that drives the card; `end`, `abort` and the counters by any.
class HostTier {
  public:
    struct Layer {
        View blobs;  // [experts] in host memory, one after the other
        size_t blob_bytes;
        BlobMatrix gate;
        BlobMatrix up;
        BlobMatrix down;
    };

    // Memory that the card and the host share: a channel for the posts, and words.
    static size_t shared_bytes(const cuda::PostShape& shape);

    // `shared`: so much mapped memory, which must be zeroed together with the card's MissState.
    // Throws std::invalid_argument for layers that do not fit the shape or their blobs.
    HostTier(const cuda::PostShape& shape, std::vector<Layer> layers, View shared, quant::Isa isa);

    // At the addresses of the host, which are those of the card too.
    const cuda::MissPost& post() const { return post_; }
    cuda::WindowWords* words() const { return words_; }

    // Called from time to time while a window is waited for; it may abort.
    void set_watch(std::function<void()> watch) { watch_ = std::move(watch); }

    // Nothing may be running on the card. What an aborted window posted last is forgotten.
    void begin();

    // This thread looks for posts, the pool computes them. Between windows the pool sleeps.
    void serve(Pool& pool);

    // Waits, without the pool, for the end of a window that cannot post.
    void await_end();

    // Ends `serve`. The card does the same by itself where its last kernel raises WindowWords::ended.
    void end();
    // Ends `serve` and every wait of the card; the window's result is void. Posts under way are not answered.
    void abort();

    bool aborted() const;
    int64_t num_posts() const { return num_posts_.load(std::memory_order_relaxed); }
    int64_t num_rows() const { return num_rows_.load(std::memory_order_relaxed); }

  private:
    // The next post as a problem in `problem_`; false when there will be none.
    bool await_post();
    void read_post();
    void publish();
    void rest(int& turns);

    cuda::PostShape shape_;
    std::vector<Layer> layers_;
    View memory_;
    cuda::MissPost post_{};
    cuda::WindowWords* words_ = nullptr;
    std::function<void()> watch_;
    const quant::RowKernels* kernels_;
    std::vector<ExpertRows> experts_;  // [pairs]
    std::vector<float> hidden_;        // [pairs, width]
    std::vector<quant::ActGroup> hidden_groups_;
    int32_t num_experts_ = 0;
    ExpertsProblem problem_{};
    uint32_t answered_ = 0;  // the last post that was answered, or forgotten
    std::atomic<int64_t> num_posts_{0};
    std::atomic<int64_t> num_rows_{0};
};

}  // namespace tandem
