// Makes allocations of the calling thread fail.
#pragma once

namespace ddpx::shm {

// During its lifetime, `operator new` of this thread throws std::bad_alloc: for the `nth`
// allocation (counted from 1) only, or for this one and all later ones.
class FailingNew {
 public:
  enum class Which { kOne, kAllFrom };

  explicit FailingNew(long nth, Which which = Which::kOne);
  ~FailingNew();
  FailingNew(const FailingNew&) = delete;
  FailingNew& operator=(const FailingNew&) = delete;

  // Whether an allocation has failed so far.
  bool happened() const;
};

}  // namespace ddpx::shm
