// A warp's ring of stages in shared memory: weight rows are fetched some stages ahead of the dot products.
#pragma once
#include "cuda_ops/experts_window.h"
#include "device/aligned_span.cuh"
#include "device/primitives.cuh"
#include "quant/row_one.cuh"

namespace tandem::cuda {

template <class T>
constexpr int kThreadsOf = quant::kOneRow<T> ? kOneRowThreads : kWindowThreads;

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

constexpr int kEveryItem = 0x7fffffff;  // a number behind that of every item

// What an item is, for who computes it: found out once, where it is fetched. One lane writes it.
template <class Note>
__device__ __forceinline__ Note& note_of(const uint8_t* stage) {
    static_assert(sizeof(Note) <= kNoteBytes);
    return *reinterpret_cast<Note*>(const_cast<uint8_t*>(stage) - kNoteBytes);
}

enum class Fetched { none, more, last };

// `Items` is a warp's work, numbered from 0. It should know an item by its number, or its note, alone: what a warp keeps while it
// multiplies costs registers that the dot products have not, and what they push out comes back through the first cache, which is
// small.
//     Fetched fetch(int item, device::StagedCopy&, uint8_t* stage, int lane)   starts the copies of an item, if there is one, and
//     writes
//                                                                              its note
//     void compute(const uint8_t* stage, int lane)                             an item whose bytes are there
class StageRing {
  public:
    // Barriers of all rings of a block come first, then the stages. Makes this warp's barriers, if it has some.
    __device__ __forceinline__ StageRing(uint8_t* memory, const RingPlan& plan, int warp, int lane)
        : memory_(memory), plan_(plan), warp_(warp) {
        if (warp < plan.num_warps && lane == 0)
#pragma unroll 1
            for (int stage = 0; stage < plan.num_stages; stage++) copy_of(stage).init();
        __syncwarp();
    }

    // Starts the first copies, as many as there are stages. Bytes that ordinary stores left there: fence_stores() and a barrier
    // first.
    template <class Items>
    __device__ __forceinline__ void fetch(const Items& items, int lane) {
        while (has_more_ && num_fetched_ < plan_.num_stages) fetch_into(num_fetched_, items, lane);
    }

    // Computes everything, and fetches what is left; after a fetch() of the same items. The ring is empty then.
    template <class Items>
    __device__ __forceinline__ void run(const Items& items, int lane) {
        run_until(kEveryItem, items, items, lane);
        num_fetched_ = num_computed_ = stage_ = 0;
        has_more_ = true;
    }

    // Computes those up to number `end` by `some`, and fetches what `items` has left.
    template <class Some, class Items>
    __device__ __forceinline__ void run_until(int end, const Some& some, const Items& items, int lane) {
#pragma unroll 1
        while (num_computed_ < min(num_fetched_, end)) {
            copy_of(stage_).wait(lane, parities_ >> stage_ & 1);
            parities_ ^= 1u << stage_;
            some.compute(stage_of(stage_), lane);
            num_computed_++;
            __syncwarp();  // all lanes have read the stage
            if (has_more_) fetch_into(stage_, items, lane);
            stage_ = stage_ + 1 == plan_.num_stages ? 0 : stage_ + 1;
        }
    }

    __device__ __forceinline__ bool is_done() const { return num_computed_ == num_fetched_; }
    __device__ __forceinline__ int num_computed() const { return num_computed_; }

  private:
    __device__ __forceinline__ int index_of(int stage) const { return warp_ * plan_.num_stages + stage; }
    __device__ __forceinline__ device::StagedCopy& copy_of(int stage) const {
        return reinterpret_cast<device::StagedCopy*>(memory_)[index_of(stage)];
    }
    __device__ __forceinline__ uint8_t* stage_of(int stage) const {
        return memory_ + stages_at(plan_) + kNoteBytes + static_cast<uint32_t>(index_of(stage)) * plan_.stage_bytes;
    }

    template <class Items>
    __device__ __forceinline__ void fetch_into(int stage, const Items& items, int lane) {
        const Fetched fetched = items.fetch(num_fetched_, copy_of(stage), stage_of(stage), lane);
        has_more_ = fetched == Fetched::more;
        num_fetched_ += fetched != Fetched::none;
    }

    uint8_t* memory_;
    const RingPlan& plan_;
    int warp_;
    int num_fetched_ = 0;   // items
    bool has_more_ = true;  // to fetch
    int num_computed_ = 0;
    int stage_ = 0;          // of the next to compute
    uint32_t parities_ = 0;  // bit s: of the next round of stage s
};

static_assert(sizeof(device::StagedCopy) == kBarrierBytes);

}  // namespace tandem::cuda
