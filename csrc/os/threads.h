// Threads that run on their own.
#pragma once

#include <system_error>
#include <thread>

namespace ddpx::os {

// Starts a thread that calls a copy of `run`. Returns whether it could start: a process may be at
// its limit of threads.
template <class Run>
[[nodiscard]] bool start_thread(const Run& run) {
  try {
    std::thread(run).detach();
    return true;
  } catch (const std::system_error&) {
    return false;
  }
}

}  // namespace ddpx::os
