// Allocations that fail on purpose, on the threads that ask for it.
#pragma once

namespace ddpx::shm {

// Lets allocations of this thread by `operator new` fail while it lives, from the `nth` one on
// (counted from 1): the `nth` alone, or all that follow as well.
class FailingNew {
 public:
  enum class Which { kOne, kAllFrom };

  explicit FailingNew(long nth, Which which = Which::kOne);
  ~FailingNew();
  FailingNew(const FailingNew&) = delete;
  FailingNew& operator=(const FailingNew&) = delete;

  // Whether one has failed so far.
  bool happened() const;
};

}  // namespace ddpx::shm
