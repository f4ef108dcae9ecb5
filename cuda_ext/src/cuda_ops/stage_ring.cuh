// A warp's ring of stages in shared memory: weight rows are fetched some stages ahead of the dot products.
#pragma once
#include "cuda_ops/experts_window.h"
#include "device/aligned_span.cuh"
#include "device/primitives.cuh"
#include "quant/row_one.cuh"

namespace tandem::cuda {

// Blocks that share a multiprocessor.
template <class T, int num_threads = kWindowThreads>
constexpr int kBlocksOf = quant::kOneRow<T> ? 2 : kWindowThreads / num_threads;

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

// What an item is, for who computes it: found out once, where it is fetched. One lane writes it.
template <class Note>
__device__ __forceinline__ Note& note_of(const uint8_t* stage) {
    static_assert(sizeof(Note) <= kNoteBytes);
    return *reinterpret_cast<Note*>(const_cast<uint8_t*>(stage) - kNoteBytes);
}

enum class Fetched : uint8_t { none, more, last };

// Where a ring stands. It lies in shared memory: the dot products want all registers, and what they push out comes back from the
// second cache, behind weights that other kernels fetch.
struct alignas(16) RingState {
    int32_t num_fetched;   // items
    int32_t num_computed;  // of them
    uint8_t stage;         // of the next to compute
    uint8_t parities;      // bit s: of the next round of stage s
    Fetched last;          // what the last fetch was
};

// `Items` is a warp's work, numbered from 0. It should know an item by its number, its note or what lies in shared memory alone:
// what a warp keeps while it multiplies costs registers that the dot products have not, and what they push out comes back through
// the first cache, which is small.
//     Fetched fetch(int item, device::StagedCopy&, uint8_t* stage, int lane)   starts an item's copies and writes its note
//     void compute(const uint8_t* stage, int lane)                             an item whose bytes are there
class StageRing {
  public:
    // States of all rings of a block come first, then barriers, then the stages. Makes those of this warp, if it has some.
    __device__ __forceinline__ StageRing(uint8_t* memory, const RingPlan& plan, int warp, int lane)
        : memory_(memory), plan_(plan), warp_(warp) {
        if (warp < plan.num_warps && lane == 0) {
#pragma unroll 1
            for (int stage = 0; stage < plan.num_stages; stage++) copy_of(stage).init();
            state() = {0, 0, 0, 0, Fetched::more};
        }
        __syncwarp();
    }

    // Starts the first copies, as many as there are stages. Bytes that ordinary stores left there: fence_stores() and a barrier
    // first.
    template <class Items>
    __device__ __forceinline__ void fetch(const Items& items, int lane) {
#pragma unroll 1
        while (state().last == Fetched::more && state().num_fetched < plan_.num_stages)
            fetch_into(state().num_fetched, items, lane);
    }

    // Computes everything, and fetches what is left; after a fetch() of the same items.
    template <class Items>
    __device__ __forceinline__ void run(const Items& items, int lane) {
        run_while([](const uint8_t*) { return true; }, items, items, lane);
    }

    // For other items, once everything is computed.
    __device__ __forceinline__ void restart(int lane) {
        __syncwarp();
        if (lane == 0) state() = {0, 0, 0, state().parities, Fetched::more};
        __syncwarp();
    }

    // Computes, by `some`, as long as `goes_on` with the next item's stage, whose note is there; fetches what `items` has left.
    template <class GoesOn, class Some, class Items>
    __device__ __forceinline__ void run_while(const GoesOn& goes_on, const Some& some, const Items& items, int lane) {
#pragma unroll 1
        while (!is_done() && goes_on(next_stage())) {
            copy_of(state().stage).wait(lane, state().parities >> state().stage & 1);
            some.compute(stage_of(state().stage), lane);
            __syncwarp();  // all lanes have read the stage
            if (state().last == Fetched::more) fetch_into(state().stage, items, lane);
            __syncwarp();  // and the state
            if (lane == 0) advance(state());
            __syncwarp();
        }
    }

    __device__ __forceinline__ bool is_done() const { return state().num_computed == state().num_fetched; }
    // Of the next item, which is fetched; only where not all is done.
    __device__ __forceinline__ const uint8_t* next_stage() const { return stage_of(state().stage); }

    // For who fetches the first item otherwise than by fetch().
    __device__ __forceinline__ uint8_t* first_stage() const { return stage_of(0); }
    __device__ __forceinline__ device::StagedCopy& first_copy() const { return copy_of(0); }
    __device__ __forceinline__ void count_first(Fetched fetched, int lane) const {
        if (lane == 0) {
            state().num_fetched = fetched != Fetched::none;
            state().last = fetched;
        }
        __syncwarp();
    }

  private:
    __device__ __forceinline__ int index_of(int stage) const { return warp_ * plan_.num_stages + stage; }
    __device__ __forceinline__ device::StagedCopy& copy_of(int stage) const {
        return reinterpret_cast<device::StagedCopy*>(memory_ + barriers_at(plan_))[index_of(stage)];
    }
    __device__ __forceinline__ uint8_t* stage_of(int stage) const {
        return memory_ + stages_at(plan_) + kNoteBytes + static_cast<uint32_t>(index_of(stage)) * plan_.stage_bytes;
    }
    __device__ __forceinline__ RingState& state() const { return reinterpret_cast<RingState*>(memory_)[warp_]; }

    __device__ __forceinline__ void advance(RingState& state) const {
        state.num_computed++;
        state.parities ^= 1u << state.stage;
        state.stage = state.stage + 1 == plan_.num_stages ? 0 : state.stage + 1;
    }

    template <class Items>
    __device__ __forceinline__ void fetch_into(int stage, const Items& items, int lane) {
        const Fetched fetched = items.fetch(state().num_fetched, copy_of(stage), stage_of(stage), lane);
        __syncwarp();  // all lanes have read the state
        if (lane == 0) {
            state().num_fetched += fetched != Fetched::none;
            state().last = fetched;
        }
        __syncwarp();
    }

    uint8_t* memory_;
    const RingPlan& plan_;
    int warp_;
};

static_assert(sizeof(device::StagedCopy) == kBarrierBytes);
static_assert(sizeof(RingState) == kStateBytes);

}  // namespace tandem::cuda
