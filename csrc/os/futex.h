// Sleeping on a word of shared memory. See Drepper, "Futexes Are Tricky".
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace ddpx::os {

// Must be lock-free: a lock would be private to one process.
using Word = std::atomic<uint32_t>;
static_assert(Word::is_always_lock_free && sizeof(Word) == 4);

// Sleeps while the word equals `seen`, until a wake-up or for at most `timeout`. May return early.
void futex_wait(const Word& word, uint32_t seen, std::chrono::nanoseconds timeout);

void futex_wake_all(const Word& word);

}  // namespace ddpx::os
