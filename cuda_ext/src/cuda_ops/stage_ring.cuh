// A warp's ring of stages in shared memory: weight rows are fetched some stages ahead of the dot products.
#pragma once
#include "cuda_ops/experts_window.h"
#include "device/aligned_span.cuh"
#include "device/primitives.cuh"

namespace tandem::cuda {

// Part `share` of `num` things in `num_shares` parts that differ by one at most.
struct EvenShare {
    int begin;
    int end;
};

// a / b of numbers below 65,536: an exact division takes five times as many instructions.
__device__ __forceinline__ int small_quotient(int a, int b) {
    return static_cast<int>(__fdividef(static_cast<float>(a) + 0.5f, static_cast<float>(b)));
}

__device__ __forceinline__ EvenShare share_of(int each, int rest, int share) {
    const int begin = each * share + min(share, rest);
    return {begin, begin + each + (share < rest)};
}
// `num` below 65,536.
__device__ __forceinline__ EvenShare even_share(int num, int share, int num_shares) {
    const int each = small_quotient(num, num_shares);
    return share_of(each, num - each * num_shares, share);
}

// Rows of a part of a blob, which has less than 4 GiB.
__device__ __forceinline__ device::AlignedSpan span_of(const uint8_t* blob, const BlobPart& part, int row, int num_rows) {
    const auto row_bytes = static_cast<uint32_t>(part.row_bytes);
    return device::aligned_span(blob + (static_cast<uint32_t>(part.offset) + static_cast<uint32_t>(row) * row_bytes),
                                static_cast<uint32_t>(num_rows) * row_bytes);
}

// `Items` is a warp's work, in two cursors over the same sequence:
//     bool fetch(device::StagedCopy&, uint8_t* stage, int lane)   starts the copies of the next item; false when there is none
//     void compute(const uint8_t* stage, int lane)                the next item, whose bytes are there
class StageRing {
  public:
    // Barriers of all rings of a block come first, then the stages. Makes this warp's barriers, if it has some.
    __device__ __forceinline__ StageRing(uint8_t* memory, const RingPlan& plan, int warp, int lane)
        : copies_(reinterpret_cast<device::StagedCopy*>(memory) + warp * plan.num_stages),
          stages_(memory + plan.num_warps * plan.num_stages * sizeof(device::StagedCopy) +
                  static_cast<size_t>(warp) * plan.num_stages * plan.stage_bytes),
          stage_bytes_(plan.stage_bytes),
          num_stages_(plan.num_stages) {
        if (warp < plan.num_warps && lane == 0)
#pragma unroll 1
            for (int i = 0; i < num_stages_; i++) copies_[i].init();
        device::fence_stores();
        __syncwarp();
    }

    // Starts as many copies as there are free stages.
    template <class Items>
    __device__ __forceinline__ void fetch(Items& items, int lane) {
        while (num_open_ < num_stages_ && start(items, lane)) {
        }
    }

    // Computes everything.
    template <class Items>
    __device__ __forceinline__ void run(Items& items, int lane) {
        fetch(items, lane);
        while (num_open_ > 0) {
            copies_[oldest_].wait(lane);
            items.compute(stages_ + oldest_ * stage_bytes_, lane);
            __syncwarp();  // all lanes have read the stage
            num_open_--;
            oldest_ = next(oldest_);
            start(items, lane);
        }
    }

  private:
    __device__ __forceinline__ int next(int stage) const { return stage + 1 == num_stages_ ? 0 : stage + 1; }

    template <class Items>
    __device__ __forceinline__ bool start(Items& items, int lane) {
        if (!items.fetch(copies_[newest_], stages_ + newest_ * stage_bytes_, lane)) return false;
        newest_ = next(newest_);
        num_open_++;
        return true;
    }

    device::StagedCopy* copies_;
    uint8_t* stages_;
    uint32_t stage_bytes_;
    int num_stages_;
    int newest_ = 0;  // the next stage to fill
    int oldest_ = 0;  // the next stage to compute
    int num_open_ = 0;
};

static_assert(sizeof(device::StagedCopy) == 16);

}  // namespace tandem::cuda
