// The events of steps with their times, in a ring of fixed size.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace ddpx {

// Files of recordings contain these numbers: append new kinds at the end.
enum class EventKind : uint8_t {
  kForwardBegin,
  kForwardEnd,
  kPhase,          // a phase begins; `index` is its number
  kBackwardBegin,  // backward has reached an output of the module
  kStepBegin,      // the first gradient of a synchronized backward
  kGradArrived,    // of param `index`; once for every part of a gradient that comes in parts
  kBucketReady,    // bucket `index` has all its gradients
  kLaunched,       // the reduction of bucket `index` is launched
  kCompleted,
  kBackwardEnd,  // only communication is left to do
  kWaitBegin,    // for bucket `index`
  kWaitEnd,
  kAgreeBegin,  // on the use of params, mispredicted buckets and finite gradients
  kAgreeEnd,
  kWrittenBack,  // the gradients of bucket `index` are where `param.grad` finds them
  kStepEnd,
  kLocalBackwardEnd,  // of a backward that is not synchronized
};

struct Event {
  int64_t time_ns;  // as steady_now()
  uint32_t step;
  int32_t index;
  EventKind kind;
};

// Nanoseconds of std::chrono::steady_clock, which the ranks of one host share.
int64_t steady_now();

// Any thread may add events, without a lock and without waiting. New events overwrite the oldest.
// A new event is lost if another thread is still writing the old event.
class EventLog {
 public:
  // Has room for at least `capacity` events. UserError for more than 2^24 events.
  explicit EventLog(std::size_t capacity);

  void add(EventKind kind, uint32_t step, std::size_t index) {
    add_at(steady_now(), kind, step, index);
  }
  void add_at(int64_t time_ns, EventKind kind, uint32_t step, std::size_t index);

  // The events in the ring, in the order of add(), without events that are being written now.
  std::vector<Event> read() const;

  std::size_t capacity() const {
    return mask_ + 1;
  }

  // The number of events ever added; only the last `capacity` are kept.
  uint64_t num_added() const {
    return next_.load(std::memory_order_relaxed);
  }

 private:
  // A sequence lock.
  struct alignas(32) Slot {
    static constexpr uint64_t kWriting = 1;  // a thread writes the other members

    std::atomic<uint64_t> sequence{0};  // (position + 1) << 8 | kind; 0: empty
    std::atomic<int64_t> time_ns{0};
    std::atomic<uint64_t> what{0};  // step << 32 | index
  };

  std::size_t mask_;
  std::unique_ptr<Slot[]> slots_;
  std::atomic<uint64_t> next_{0};
};

}  // namespace ddpx
