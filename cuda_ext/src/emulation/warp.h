// Operations of a warp and barriers. All 32 lanes must come, from the same line of the source.
#pragma once
#include <cstdint>

#include "emulation/block.h"

namespace tandem::emulation {

inline void require_full(unsigned mask, const char* operation) {
    if (mask != kAllLanes) current->block->fail(std::string(operation) + ": the mask is not that of all lanes");
}

template <typename T>
struct Shuffle {
    T value;
    int source;
    T result;
};

template <typename T>
T shuffle(const char* operation, unsigned mask, T value, int source, const Place& place) {
    require_full(mask, operation);
    Shuffle<T> mine{value, source, {}};
    current->block->meet(
        operation, &mine,
        [](void* const(&lanes)[kLanes]) {
            for (void* lane : lanes) {
                auto* shuffle = static_cast<Shuffle<T>*>(lane);
                shuffle->result = static_cast<Shuffle<T>*>(lanes[shuffle->source])->value;
            }
        },
        place);
    return mine.result;
}

// Every lane gets combine(... combine(combine(v0, v1), v2) ..., v31); combine must have no order.
template <typename Combine, typename T>
T reduce(const char* operation, unsigned mask, T value, const Place& place) {
    require_full(mask, operation);
    current->block->meet(
        operation, &value,
        [](void* const(&lanes)[kLanes]) {
            T total = *static_cast<T*>(lanes[0]);
            for (int i = 1; i < kLanes; i++) total = Combine()(total, *static_cast<T*>(lanes[i]));
            for (void* lane : lanes) *static_cast<T*>(lane) = total;
        },
        place);
    return value;
}

struct Sum {
    template <typename T>
    T operator()(T a, T b) const {
        return static_cast<T>(static_cast<unsigned>(a) + static_cast<unsigned>(b));
    }
};
struct Larger {
    template <typename T>
    T operator()(T a, T b) const {
        return a < b ? b : a;
    }
};
struct Smaller {
    template <typename T>
    T operator()(T a, T b) const {
        return b < a ? b : a;
    }
};
struct BitOr {
    unsigned operator()(unsigned a, unsigned b) const { return a | b; }
};
struct BitAnd {
    unsigned operator()(unsigned a, unsigned b) const { return a & b; }
};

inline unsigned ballot(const char* operation, unsigned mask, bool vote, const Place& place) {
    return reduce<BitOr>(operation, mask, vote ? 1u << current->lane : 0u, place);
}

}  // namespace tandem::emulation

using tandem::emulation::Place;

// A lane outside its segment of `width` lanes reads its own value, as on a card.
template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, Place place = Place::current()) {
    const int lane = tandem::emulation::current->lane;
    return tandem::emulation::shuffle("__shfl_sync", mask, value, (lane & ~(width - 1)) | (source & (width - 1)), place);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, Place place = Place::current()) {
    const int lane = tandem::emulation::current->lane, source = lane ^ bits;
    const bool inside = source < (lane & ~(width - 1)) + width;
    return tandem::emulation::shuffle("__shfl_xor_sync", mask, value, inside ? source : lane, place);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, Place place = Place::current()) {
    const int lane = tandem::emulation::current->lane, source = lane + static_cast<int>(delta);
    const bool inside = source < (lane & ~(width - 1)) + width;
    return tandem::emulation::shuffle("__shfl_down_sync", mask, value, inside ? source : lane, place);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, Place place = Place::current()) {
    const int lane = tandem::emulation::current->lane, source = lane - static_cast<int>(delta);
    const bool inside = source >= (lane & ~(width - 1));
    return tandem::emulation::shuffle("__shfl_up_sync", mask, value, inside ? source : lane, place);
}

inline unsigned __reduce_add_sync(unsigned mask, unsigned value, Place place = Place::current()) {
    return tandem::emulation::reduce<tandem::emulation::Sum>("__reduce_add_sync", mask, value, place);
}
inline int __reduce_add_sync(unsigned mask, int value, Place place = Place::current()) {
    return tandem::emulation::reduce<tandem::emulation::Sum>("__reduce_add_sync", mask, value, place);
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value, Place place = Place::current()) {
    return tandem::emulation::reduce<tandem::emulation::Larger>("__reduce_max_sync", mask, value, place);
}
inline int __reduce_max_sync(unsigned mask, int value, Place place = Place::current()) {
    return tandem::emulation::reduce<tandem::emulation::Larger>("__reduce_max_sync", mask, value, place);
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned value, Place place = Place::current()) {
    return tandem::emulation::reduce<tandem::emulation::Smaller>("__reduce_min_sync", mask, value, place);
}
inline int __reduce_min_sync(unsigned mask, int value, Place place = Place::current()) {
    return tandem::emulation::reduce<tandem::emulation::Smaller>("__reduce_min_sync", mask, value, place);
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned value, Place place = Place::current()) {
    return tandem::emulation::reduce<tandem::emulation::BitOr>("__reduce_or_sync", mask, value, place);
}
inline unsigned __reduce_and_sync(unsigned mask, unsigned value, Place place = Place::current()) {
    return tandem::emulation::reduce<tandem::emulation::BitAnd>("__reduce_and_sync", mask, value, place);
}

inline unsigned __ballot_sync(unsigned mask, int vote, Place place = Place::current()) {
    return tandem::emulation::ballot("__ballot_sync", mask, vote != 0, place);
}
inline int __any_sync(unsigned mask, int vote, Place place = Place::current()) {
    return tandem::emulation::ballot("__any_sync", mask, vote != 0, place) != 0;
}
inline int __all_sync(unsigned mask, int vote, Place place = Place::current()) {
    return tandem::emulation::ballot("__all_sync", mask, vote != 0, place) == tandem::emulation::kAllLanes;
}

inline void __syncwarp(unsigned mask = ~0u, Place place = Place::current()) {
    tandem::emulation::require_full(mask, "__syncwarp");
    tandem::emulation::current->block->meet("__syncwarp", nullptr, nullptr, place);
}
inline void __syncthreads(Place place = Place::current()) {
    tandem::emulation::current->block->barrier(place);
}
