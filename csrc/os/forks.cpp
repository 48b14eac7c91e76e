#include "forks.h"

#include <pthread.h>

namespace ddpx::os {
namespace {

std::atomic<uint64_t> forks{0};

void after_fork_in_child() {
  forks.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace

uint64_t num_forks() {
  static const int registered = pthread_atfork(nullptr, nullptr, after_fork_in_child);
  (void)registered;
  return forks.load(std::memory_order_relaxed);
}

}  // namespace ddpx::os
