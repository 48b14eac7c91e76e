// Where futures are completed.
#pragma once

#include <new>

#include "../os/threads.h"

namespace ddpx {

// Calls `complete`, which completes a future, on a new thread. Callbacks of a future may wait for
// other futures. They must neither block a thread that runs operations, nor fill a pool of threads
// that other futures need.
template <class Complete>
void complete_on_new_thread(const Complete& complete) {
  bool started = false;
  try {
    started = os::start_thread(complete);
  } catch (const std::bad_alloc&) {
    // An incomplete future would block its waiters.
  }
  if (!started) {
    complete();
  }
}

}  // namespace ddpx
