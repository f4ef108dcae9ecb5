// What a card tells the host about experts that it cannot compute, and where the host answers: one piece of mapped memory.
//
// The card writes a post, then its sequence number; the host writes the rows, then the same number as `done`. A window posts
// at most once per layer, and no second time before the first post was answered, so one place serves all of them.
//
//     PostHeader    by the card, `sequence` last
//     PostAnswer    by the host
//     PostEnd       by the card (or the host for it) when a window is through
//     experts       PostedExpert [pairs]: whose pairs are pairs[first .. first + count)
//     pairs         int32 [pairs]: pair = row * top_k + place in the row's list; rows rise within one expert
//     groups        ActGroup [rows, groups of hidden]: the rows after the norm, quantised
//     values        float [rows, hidden]: the same as floats, where gate or up want those
//     rows          float [pairs, hidden]: the answer, in the order of `pairs`
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "quant/row.h"

namespace tandem::cuda {

struct alignas(64) PostHeader {
    uint32_t sequence;  // the post's number; counts through all windows, 0 before the first post
    int32_t layer;
    int32_t num_rows;
    int32_t num_experts;
    int32_t num_pairs;
};

struct alignas(64) PostAnswer {
    uint32_t done;   // the number of the post whose rows are there
    uint32_t abort;  // not 0: nothing more will come for this window; every wait on the card ends
};

struct alignas(64) PostEnd {
    uint32_t ended;  // not 0: the window is through
};

struct PostedExpert {
    int32_t expert;
    int32_t first;
    int32_t count;
};

struct PostShape {
    int32_t max_rows;
    int32_t top_k;
    int32_t hidden;
};

// The parts of a post as one side sees them. Plain pointers: a kernel takes it by value.
struct MissPost {
    PostHeader* header;
    PostAnswer* answer;
    PostEnd* end;
    PostedExpert* experts;
    int32_t* pairs;
    quant::ActGroup* groups;
    float* values;
    float* rows;

    // `memory`: post_bytes(shape) of them, 64-byte aligned, at the address of the side that asks.
    static MissPost in(std::byte* memory, const PostShape& shape);
};

struct PostOffsets {
    size_t answer, end, experts, pairs, groups, values, rows, nbytes;
};

inline PostOffsets post_offsets(const PostShape& shape) {
    constexpr size_t kAlignment = 64;
    const size_t num_rows = shape.max_rows, num_pairs = num_rows * shape.top_k, hidden = shape.hidden;
    size_t used = sizeof(PostHeader);
    const auto take = [&](size_t nbytes) {
        const size_t offset = used;
        used += (nbytes + kAlignment - 1) / kAlignment * kAlignment;
        return offset;
    };
    PostOffsets offsets{};
    offsets.answer = take(sizeof(PostAnswer));
    offsets.end = take(sizeof(PostEnd));
    offsets.experts = take(num_pairs * sizeof(PostedExpert));
    offsets.pairs = take(num_pairs * sizeof(int32_t));
    offsets.groups = take(num_rows * ((hidden + 255) / 256) * sizeof(quant::ActGroup));
    offsets.values = take(num_rows * hidden * sizeof(float));
    offsets.rows = take(num_pairs * hidden * sizeof(float));
    offsets.nbytes = used;
    return offsets;
}

inline size_t post_bytes(const PostShape& shape) {
    return post_offsets(shape).nbytes;
}

inline MissPost MissPost::in(std::byte* memory, const PostShape& shape) {
    const PostOffsets at = post_offsets(shape);
    MissPost post{};
    post.header = reinterpret_cast<PostHeader*>(memory);
    post.answer = reinterpret_cast<PostAnswer*>(memory + at.answer);
    post.end = reinterpret_cast<PostEnd*>(memory + at.end);
    post.experts = reinterpret_cast<PostedExpert*>(memory + at.experts);
    post.pairs = reinterpret_cast<int32_t*>(memory + at.pairs);
    post.groups = reinterpret_cast<quant::ActGroup*>(memory + at.groups);
    post.values = reinterpret_cast<float*>(memory + at.values);
    post.rows = reinterpret_cast<float*>(memory + at.rows);
    return post;
}

}  // namespace tandem::cuda
