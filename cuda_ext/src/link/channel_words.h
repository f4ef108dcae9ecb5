// The states of a channel: pure steps on its words, the same for threads of a host card and for streams of a GPU.
//
// tests/test_link_words.py drives exactly these functions through every order of steps, deaths and new beginnings.
#pragma once
#include <atomic>

#include "link/layout.h"

namespace tandem::link {

inline uint32_t load(const uint32_t& word) {
    return std::atomic_ref(const_cast<uint32_t&>(word)).load(std::memory_order_acquire);
}
inline void store(uint32_t& word, uint32_t value) {
    std::atomic_ref(word).store(value, std::memory_order_release);
}

// The requester's steps.

// Whether the request may be written. False while a server may still be at work on an earlier one.
inline bool may_ask(const ChannelWords& words) {
    return load(words.done) == load(words.seq);
}
// The request is complete.
inline void post(ChannelWords& words) {
    store(words.seq, words.seq + 1);
}
// The rows are there, or it was refused or dropped: `status` says which.
inline bool is_answered(const ChannelWords& words) {
    return may_ask(words);
}

// The server's steps.

inline bool has_request(const ChannelWords& words) {
    return load(words.seq) != words.done;
}
// Behind the rows.
inline void answer(ChannelWords& words, Status status, uint32_t late) {
    store(words.status, static_cast<uint32_t>(status));
    store(words.late, late);
    store(words.done, words.done + 1);
}
// A new server, before its first request.
inline void begin_serving(ChannelWords& words) {
    if (!has_request(words)) return;
    store(words.status, static_cast<uint32_t>(Status::dropped));
    store(words.late, 0);
    store(words.done, load(words.seq));  // one that ended while it stopped may have left several
}

}  // namespace tandem::link
