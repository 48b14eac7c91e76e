// The time for which a rank polls a word before it sleeps on the word.
#pragma once

#include <chrono>
#include <vector>

#include "../os/limits.h"

namespace ddpx::shm {

// A sleep and a wake-up cost tens of microseconds on a virtual machine. Spinning is therefore
// cheaper if the awaited rank runs on another core. If the awaited rank may need this core, a
// few `sched_yield` calls are cheaper: no other rank has to end them by a wake-up.
struct SpinPolicy {
  std::chrono::microseconds spin{0};  // time of polling without yielding the core
  int yields = 0;                     // number of yields after that, each followed by a poll
};

// Spins only if each local rank can have a core of its own, and the CPU quota of this rank is
// enough for all local ranks that share the quota. Ranks may be bound to different cores.
SpinPolicy choose_spin_policy(const std::vector<os::CpuLimits>& local_ranks, int own_index);

// Tells the core that the calling loop is a spin loop.
inline void cpu_relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace ddpx::shm
