// Times of what a device does, read when it has been done.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <deque>
#include <mutex>

#include "event_log.h"

namespace ddpx {

// A kernel runs later than the call that queues it. A mark is a timing event behind it in its
// stream; nothing waits for it in a step. Device-generic, for one device. Any thread may call.
class DeviceMarks {
 public:
  // Waits for the device once, to relate its clock to the host's.
  explicit DeviceMarks(c10::Device device);

  // Behind what the current stream has to do.
  void mark(EventKind kind, uint32_t step, std::size_t index);

  // Moves the times of marks that the device has passed into the log.
  void collect(EventLog& log);

  // As collect(), of all; waits for the device.
  void collect_all(EventLog& log);

  // How far times may be off: what the wait in the constructor took, and what the clocks of host
  // and device had drifted apart at the last collect_all().
  int64_t error_ns() const {
    return error_ns_;
  }

 private:
  struct Mark {
    c10::Event event;
    EventKind kind;
    uint32_t step;
    std::size_t index;
  };

  c10::Event record(c10::Stream stream) const;
  int64_t time_of(const c10::Event& event) const;

  c10::Device device_;
  c10::Event anchor_;  // its time on the host's clock is known
  int64_t anchor_ns_ = 0;
  int64_t error_ns_ = 0;
  std::mutex mutex_;  // guards what follows, and the anchor
  std::deque<Mark> marks_;
};

}  // namespace ddpx
