// What a card tells somebody else about experts that it does not compute itself, and where the answer comes: the host tier, a
// second card, another engine.
//
// The asker writes a request, then its number as `sequence`; the answerer writes the rows, then the same number as `done`. A window
// asks each of them at most once per layer, and no second time before the first request was answered, so one place serves all
// layers. The words and arrays are those of a channel of the link (link/layout.h), wherever they lie.
#pragma once
#include <cstddef>
#include <cstdint>

#include "cuda_ops/window_state.h"
#include "link/layout.h"
#include "quant/row.h"

namespace tandem::cuda {

// Who computes rows for a card.
enum Source : int32_t { kHostSource, kPeerSource, kLinkedSource, kNumSources };

struct PostShape {
    int32_t max_rows;
    int32_t top_k;
    int32_t hidden;

    link::Geometry geometry() const {
        return {1,
                static_cast<uint32_t>(max_rows * top_k),
                static_cast<uint32_t>(top_k),
                static_cast<uint32_t>(max_rows),
                static_cast<uint32_t>(hidden),
                0};
    }
};

// The parts of a post at the addresses of the side that asks. Plain pointers: a kernel takes it by value.
struct MissPost {
    // Written by the asker.
    uint32_t* sequence;  // the request's number; it counts on through all windows
    link::Request* request;
    link::RequestExpert* experts;
    int32_t* pair_rows;       // [pairs] whose row of the window each is; rows rise within one expert
    quant::ActGroup* groups;  // [rows, groups of hidden]: the rows after the norm, quantised
    float* values;            // [rows, hidden]: the same as floats, where gate or up want those
    // By the answerer.
    uint32_t* done;    // the number of the request whose rows are there
    uint32_t* status;  // of that request: link::Status
    uint32_t* late;    // how many of its experts were no longer in a slot
    float* rows;       // [pairs, hidden], in the order of `pair_rows`

    // The two halves may lie on different cards.
    static MissPost of(const link::Channel& asked, const link::Channel& answered) {
        return {&asked.words->seq, asked.request,         asked.experts,           asked.pair_rows,       asked.groups,
                asked.values,      &answered.words->done, &answered.words->status, &answered.words->late, answered.rows};
    }
};

// Words of a window in mapped memory.
struct WindowWords {
    // By the host. Not 0: nothing more will come for this window; every wait on the card ends.
    alignas(link::kLine) uint32_t abort;
    // By the card (or the host for it). Not 0: the window is through.
    alignas(link::kLine) uint32_t ended;
};

// On the card, one per card, zeroed together with the memory of its posts.
struct MissState {
    uint32_t posted[kNumSources];   // number of the last request
    uint32_t arrived[kNumSources];  // the last request whose answer block 0 has seen
    uint32_t voided;                // not 0: a wait was aborted and the window's result is void; cleared before the next window
    uint32_t asked_layers;          // 1 + the last layer of the window whose posts are out; 0 between windows
    // Of each row before the experts: the bits of 1 / rms, and above them 1 + the layer that it is of; 0 between windows.
    uint64_t normed[kMaxWindowRows];
};

}  // namespace tandem::cuda
