// How long a rank looks at a word before it goes to sleep on it.
#pragma once

#include <chrono>

namespace ddpx::shm {

// A sleep and a wake-up cost tens of microseconds on a virtual machine, so a short look pays where
// the rank that is waited for runs on another core. Where it may need this very core, it does not;
// giving the core away pays there, a few times, since it is no sleep that someone must end.
struct Patience {
  std::chrono::microseconds spin{0};  // look, without giving the core away
  int yields = 0;                     // then give it away this many times, looking after each
};

// Cores that this process may run on.
int usable_cores();

Patience choose_patience(int num_local_ranks, int num_cores);

// Tells the core that this is a loop that waits.
inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace ddpx::shm
