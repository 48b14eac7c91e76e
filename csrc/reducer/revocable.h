// Access to an object whose owner may destroy it at any time.
#pragma once

#include <cstdint>
#include <mutex>

#include "../os/forks.h"

namespace ddpx {

// Threads that must not become the last owner of an object call the object through this class. The
// owner shares a Revocable with these threads, and revokes it before the object is destroyed.
// Thread-safe.
template <typename Object>
class Revocable {
 public:
  explicit Revocable(Object* object) : object_(object) {}

  // Returns `function(object)`, or a default value if the access is revoked. revoke() waits for the
  // call, so the call must not wait for the owner.
  template <typename Function>
  auto with(const Function& function) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return object_ != nullptr ? function(*object_) : decltype(function(*object_))();
  }

  // When this returns, no call runs, and none will.
  void revoke() {
    if (forks_ != os::num_forks()) {
      return;  // in a forked child no other thread runs, and one may have held the mutex in the
               // parent
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    object_ = nullptr;
  }

 private:
  const uint64_t forks_ = os::num_forks();
  std::mutex mutex_;
  Object* object_;
};

}  // namespace ddpx
