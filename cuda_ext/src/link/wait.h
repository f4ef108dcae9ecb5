// Waiting for a word that another process changes.
#pragma once
#include <cstdint>

namespace tandem::link {

constexpr int kRestsBeforeSleep = 4000;

// Waits a moment, `spins` counting up from 0: pauses at first, then offers the core to others.
void rest(int& spins);
// Sleeps until `wake`, or about a hundredth of a second, unless the word has changed already.
void sleep_on(uint32_t& word, uint32_t seen);
void wake(uint32_t& word);

}  // namespace tandem::link
