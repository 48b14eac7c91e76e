// A work that reports its end without delay.
#pragma once

#include <functional>

namespace ddpx {

// For a c10d::Work whose future completes later than the work.
class GivesEndNotice {
 public:
  // Calls `callback` once when the work has ended: on the thread that executed the work, or on the
  // calling thread if the work has ended already. The callback must neither wait nor throw.
  virtual void notify_at_end(std::function<void()> callback) = 0;

 protected:
  ~GivesEndNotice() = default;
};

}  // namespace ddpx
