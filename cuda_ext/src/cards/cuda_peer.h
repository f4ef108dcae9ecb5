// The peer tier: a second card of this process computes the rows of experts that lie in its slots.
//
// The own card pushes a window's request into the second card's memory; that one pushes the rows back. No host is in between. Where
// the cards do not reach each other, both lie in mapped host memory.
#pragma once
#include <memory>

#include "cards/cuda_program.h"
#include "cards/cuda_row_server.h"

namespace tandem {

// Confined to the engine loop.
class CudaPeer {
  public:
    // `table`: of the program's card, which looks into `peer_table` from here on; before the program's first run. `direct`: whether
    // the cards were seen to reach each other. Throws std::invalid_argument, std::bad_alloc.
    CudaPeer(std::shared_ptr<CudaProgram> program, std::shared_ptr<CudaExpertTable> table, std::shared_ptr<CudaCard> peer_card,
             std::shared_ptr<CudaExpertTable> peer_table, bool direct);
    ~CudaPeer();

    // Between windows. The second card has nothing to do for this process before the first and after the second, and windows must
    // find no expert in its slots then.
    void attach();
    void detach();

    // Share of a window's absent experts that this card reads from the arena, over its own way to host memory; 0 where it cannot.
    void set_streamed_ratio(float ratio);
    float streamed_ratio() const { return streamed_ratio_; }

    int64_t served_rows() const { return server_->served_rows(); }

  private:
    std::shared_ptr<CudaProgram> program_;
    std::shared_ptr<CudaExpertTable> table_;
    std::shared_ptr<CudaCard> card_;
    std::shared_ptr<CudaExpertTable> peer_table_;
    link::Geometry geometry_;
    View asked_memory_;
    View answered_memory_;
    link::Channel asked_;
    link::Channel answered_;
    std::unique_ptr<CudaRowServer> server_;
    float streamed_ratio_ = 0.0f;
    uint32_t last_ = 0;  // number of the last request, while nothing runs
};

}  // namespace tandem
