// What happened when, in a ring of fixed size.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace ddpx {

// The numbers stand in files of recordings: new ones go to the end.
enum class EventKind : uint8_t {
  kForwardBegin,
  kForwardEnd,
  kPhase,          // a phase begins; `index` is its number
  kBackwardBegin,  // backward has reached an output of the module
  kStepBegin,      // the first gradient of a synchronised backward
  kGradArrived,    // of param `index`; once for every part of a gradient that comes in parts
  kBucketReady,    // bucket `index` has all its gradients
  kLaunched,       // its all-reduce
  kCompleted,
  kBackwardEnd,  // nothing is left of backward but communication
  kWaitBegin,    // for bucket `index`
  kWaitEnd,
  kAgreeBegin,  // on what params were used, on second passes, on finite gradients
  kAgreeEnd,
  kWrittenBack,  // its gradients are where param.grad finds them
  kStepEnd,
  kLocalBackwardEnd,  // of a backward that is not synchronised
};

struct Event {
  int64_t time_ns;  // as steady_now()
  uint32_t step;
  int32_t index;
  EventKind kind;
};

// Nanoseconds of std::chrono::steady_clock, which the ranks of one host share.
int64_t steady_now();

// Any thread adds, without a lock and without waiting; the newest events overwrite the oldest.
class EventLog {
 public:
  // For at least as many events. UserError if they would take all too much memory.
  explicit EventLog(std::size_t capacity);

  void add(EventKind kind, uint32_t step, std::size_t index) {
    add_at(steady_now(), kind, step, index);
  }
  void add_at(int64_t time_ns, EventKind kind, uint32_t step, std::size_t index);

  // What the ring holds, in the order in which it was added, without what is just being written.
  std::vector<Event> read() const;

  std::size_t capacity() const {
    return mask_ + 1;
  }

  // Ever; those beyond `capacity` are lost.
  uint64_t num_added() const {
    return next_.load(std::memory_order_relaxed);
  }

 private:
  // A sequence lock: `ticket` is 0 while the rest is written, and tells whose turn the rest is of.
  struct alignas(32) Slot {
    std::atomic<uint64_t> ticket{0};  // (position + 1) << 8 | kind
    std::atomic<int64_t> time_ns{0};
    std::atomic<uint64_t> what{0};  // step << 32 | index
  };

  std::size_t mask_;
  std::unique_ptr<Slot[]> slots_;
  std::atomic<uint64_t> next_{0};
};

}  // namespace ddpx
