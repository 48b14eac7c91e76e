// A work that tells at once when it has ended.
#pragma once

#include <functional>

namespace ddpx {

// To be implemented by a c10d::Work whose future tells later than that.
class GivesEndNotice {
 public:
  // Calls `callback` once, when the work has ended, on the thread that carried it out, or right
  // here if it has. The callback must neither wait nor throw.
  virtual void notify_at_end(std::function<void()> callback) = 0;

 protected:
  ~GivesEndNotice() = default;
};

}  // namespace ddpx
