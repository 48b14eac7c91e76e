// Objects of a process that its forked children do not share.
#pragma once

#include <atomic>
#include <cstdint>

namespace ddpx::os {

// The number of forks between this process and its first ancestor that called this function.
uint64_t num_forks();

// Returns the one object of this type in this process. A forked child makes its own object: threads
// of the parent may hold locks of the old object. The object is never destroyed, since its threads
// may run until the process ends. Thread-safe.
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
  delete made;  // another thread has made the object
  return known->object;
}

}  // namespace ddpx::os
