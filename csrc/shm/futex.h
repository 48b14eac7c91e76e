// Sleeping on a word of shared memory. Ideas: Drepper, "Futexes Are Tricky".
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace ddpx::shm {

// Lock-free, so that it means the same in every process that maps it.
using Word = std::atomic<uint32_t>;
static_assert(Word::is_always_lock_free && sizeof(Word) == 4);

// Sleeps while the word is `seen`, until woken or for `most`. May return early for no reason.
void futex_wait(const Word& word, uint32_t seen, std::chrono::nanoseconds most);

void futex_wake_all(const Word& word);

}  // namespace ddpx::shm
