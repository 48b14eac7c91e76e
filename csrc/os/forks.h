// Objects of a process that its forked children do not share.
#pragma once

#include <atomic>
#include <cstdint>

namespace ddpx::os {

// How often this process was forked off since its first ancestor that called this function.
uint64_t num_forks();

// Returns the one object of this type in this process. A forked child makes its own: threads of the
// parent may hold locks of the old one. The object is never destroyed, since its threads may run
// until the process ends. Thread-safe.
template <class Object>
Object& instance_in_process() {
  struct Instance {
    uint64_t num_forks;
    Object object{};
  };
  static std::atomic<Instance*> current{nullptr};
  const auto forks = num_forks();
  auto* known = current.load();
  if (known != nullptr && known->num_forks == forks) {
    return known->object;
  }
  auto* made = new Instance{forks};
  if (current.compare_exchange_strong(known, made)) {
    return made->object;
  }
  delete made;  // another thread was quicker
  return known->object;
}

}  // namespace ddpx::os
