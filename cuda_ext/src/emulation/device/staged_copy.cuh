// Emulation of device/staged_copy.cuh: the bytes come when they are waited for, and not before.
#pragma once
#include <cuda_runtime.h>

#include "device/aligned_span.cuh"

namespace tandem::device {

class StagedCopy {
  public:
    void init() {
        serial_ = emulation::current->block->serial();
        num_starts_ = num_calls_ = num_rounds_ = 0;
    }

    void start(void* shared, const void* global, uint32_t nbytes, int lane) {
        check("StagedCopy::start", lane);
        emulation::Block& block = *emulation::current->block;
        if ((reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(global) | nbytes) % kCopyUnit != 0)
            block.fail("calls StagedCopy::start with an address or a size that is not a multiple of 16");
        num_calls_++;
        if (lane != 0) return;
        num_starts_++;
        block.staged.push_back({this, shared, global, nbytes});
    }

    void wait(int lane, uint32_t parity, Place place = Place::current()) {
        check("StagedCopy::wait", lane);
        if (parity != num_rounds_ % 2)
            emulation::current->block->fail("waits for another round of a StagedCopy than that under way");
        emulation::current->block->meet(
            "StagedCopy::wait", this, [](void* const(&lanes)[emulation::kLanes]) { static_cast<StagedCopy*>(lanes[0])->finish(); },
            place);
    }

  private:
    void check(const char* method, int lane) const {
        emulation::Block& block = *emulation::current->block;
        if (serial_ != block.serial()) block.fail(std::string(method) + ": init() was not called");
        if (lane != emulation::current->lane) block.fail(std::string(method) + ": that is not the lane's number");
    }

    void finish() {
        emulation::Block& block = *emulation::current->block;
        if (num_calls_ != num_starts_ * emulation::kLanes) block.fail("waits for a StagedCopy that some lanes did not start");
        auto mine = [this](const emulation::StagedBytes& part) { return part.owner == this; };
        for (const emulation::StagedBytes& part : block.staged)
            if (mine(part)) std::memcpy(part.to, part.from, part.nbytes);
        std::erase_if(block.staged, mine);
        num_starts_ = num_calls_ = 0;
        num_rounds_++;
    }

    uint64_t serial_;  // of the block that called init()
    uint16_t num_starts_, num_calls_;
    uint32_t num_rounds_;
};

inline void fence_stores() {}

}  // namespace tandem::device
