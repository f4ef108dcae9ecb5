// One engine's end of a link on a CUDA card: its windows ask the partner for rows by themselves, and a stream answers the
// partner's.
#pragma once
#include <atomic>
#include <memory>
#include <string>

#include "cards/cuda_program.h"
#include "cards/cuda_row_server.h"
#include "link/presence.h"

namespace tandem {

// Confined to the engine loop; counters by any thread.
class CudaLink final : public WindowPartner {
  public:
    struct Options {
        int role;  // 0 or 1
        std::string fingerprint;
        link::Geometry geometry;  // of windows
        double stuck_after_s;     // a partner that makes no progress for so long is given up
    };

    // `table`: of the program's card; what it holds is published from here on. Before the program's first run. Throws
    // std::invalid_argument for a file of another model or geometry, an arena that is not pinned, or kernels that cannot share the
    // card.
    CudaLink(View file, const Options& options, std::shared_ptr<CudaProgram> program, std::shared_ptr<CudaExpertTable> table);
    ~CudaLink() override;

    // Starts or stops to offer this card's experts. What is asked already is still answered.
    void serve(bool serving);
    bool serving() const { return presence_.is_serving(); }
    bool partner_attached() const { return presence_.partner_attached(); }
    // The last run is void because the partner did not answer; true once.
    bool take_loss() { return std::exchange(lost_, false); }
    // Not here any more. Idempotent.
    void close();

    const uint8_t* begin_window(int num_rows, cudaStream_t stream) override;
    const uint8_t* offer_place() const override;
    bool partner_is_there() override { return presence_.partner_is_there(); }
    void end_window(bool voided) override;

    int64_t served_rows() const { return server_->served_rows(); }
    int64_t late_experts() const { return server_->late_experts(); }
    int64_t num_losses() const { return num_losses_; }

  private:
    class RegisteredFile;

    void offer(cudaStream_t stream);
    bool await_silence();

    std::shared_ptr<CudaProgram> program_;
    std::shared_ptr<CudaExpertTable> table_;
    std::unique_ptr<RegisteredFile> registered_;
    link::Presence presence_;
    link::Geometry geometry_;
    View offered_;         // [layers, experts] on the card: what the partner offered when the last window began
    View staged_offered_;  // the same in mapped memory
    std::unique_ptr<CudaRowServer> server_;
    uint32_t last_asked_ = 0;  // number of the last request, as the card counts
    bool asking_ = false;
    uint32_t refused_by_ = 0;  // which process of the partner (RoleWords::num_attached) cannot compute for this one; 0: none
    bool lost_ = false;
    bool closed_ = false;
    int64_t num_losses_ = 0;
};

}  // namespace tandem
