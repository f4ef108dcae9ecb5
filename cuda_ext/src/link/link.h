// One engine's end of a link on a host card: asks the partner for rows, and computes the partner's.
#pragma once
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cache/expert_table.h"
#include "link/presence.h"
#include "ops/experts.h"
#include "ops/linked_rows.h"
#include "pool/pool.h"

namespace tandem::link {

struct Options {
    int role;  // 0 or 1
    std::string fingerprint;
    Geometry geometry;
    quant::Isa isa;
    int num_threads;       // that compute the partner's rows
    double stuck_after_s;  // a partner that makes no progress for so long is given up
};

// Thread rule: `set_layer`, `serve`, `begin_window`, `take_loss` by the thread that drives the card; `ask` and `collect` by the
// running program; `hold` and `release` by any, in pairs; counters by any.
class Link : public LinkedRows {
  public:
    // `table`: this engine's; what it holds is published from here on. Throws std::invalid_argument for a file of another model
    // or geometry.
    Link(View file, Options options, std::shared_ptr<ExpertTable> table);
    ~Link() override;

    // The matrices of a layer's blobs; all layers before `serve`.
    void set_layer(int layer, const BlobMatrix& gate, const BlobMatrix& up, const BlobMatrix& down);

    // Starts or stops to offer this card's experts. What is asked already is still answered.
    void serve(bool serving);
    bool serving() const { return presence_.is_serving(); }

    // Whether the partner has a process here, so that its residency means something. It may have died this moment.
    bool partner_attached() const { return presence_.partner_attached(); }
    // Before a run of so many rows: whether its linked experts are asked of the partner. Tells the table.
    bool begin_window(int num_rows);
    // The last run is void because the partner did not answer; true once.
    bool take_loss() { return lost_.exchange(false); }

    // Not here any more: ends the thread behind what was asked already. Idempotent.
    void close();

    void ask(const ExpertsProblem& problem) override;
    void collect(const ExpertsProblem& problem) override;
    bool lost() const override { return lost_.load(std::memory_order_relaxed); }
    void hold() override;
    void release() override;

    int64_t served_rows() const { return served_rows_.load(std::memory_order_relaxed); }
    // Experts that were asked for a moment too late: no longer in a slot, computed from the arena.
    int64_t late_experts() const { return late_experts_.load(std::memory_order_relaxed); }
    int64_t num_losses() const { return num_losses_.load(std::memory_order_relaxed); }

  private:
    struct Layer {
        BlobMatrix gate, up, down;
    };

    void copy_request(const ExpertsProblem& problem);
    bool await_rows();

    void work();
    void idle(int& spins);
    void answer_request();
    bool request_is_sound(const Request& request) const;
    uint32_t compute(int layer, const RequestExpert& expert);
    void begin_computing();
    void end_computing();

    Options options_;
    std::shared_ptr<ExpertTable> table_;
    Presence presence_;
    Channel asked_;   // this engine's requests
    Channel served_;  // the partner's
    std::vector<Layer> layers_;

    // Asking
    std::vector<int32_t> row_places_;  // [rows] where a row of the run stands in the request, or -1
    std::vector<RequestExpert> awaited_;
    std::vector<int32_t> awaited_firsts_;  // where each expert's pairs stand in the run's list
    std::atomic<bool> lost_{false};

    // Serving
    Pool pool_;
    std::thread thread_;
    std::mutex mutex_;
    std::condition_variable changed_;
    int num_holders_ = 0;
    bool computing_ = false;
    std::atomic<bool> ending_{false};
    std::vector<float> hidden_;
    std::vector<quant::ActGroup> hidden_groups_;
    std::atomic<int64_t> served_rows_{0};
    std::atomic<int64_t> late_experts_{0};
    std::atomic<int64_t> num_losses_{0};
};

}  // namespace tandem::link
